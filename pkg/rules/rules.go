package rules

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

// Bounds of one client's rules.
const (
	MaxKeys      = 64
	MaxOverrides = 256
	MaxNote      = 256 // bytes of a label or a reason
)

// User is one client: a user with API keys, or an address (see IsAddress) that has rules of its own.
type User struct {
	// Name is a user's name, or an address's client id, "ip:<address>" or "ip:<prefix>/<bits>".
	Name string `json:"name"`
	// Plan is the name of a plan of the rules or of the policy; "": none.
	Plan string `json:"plan,omitempty"`
	// Admin exempts from every limit.
	Admin bool `json:"admin,omitempty"`
	// Keys are sorted by hash, Overrides by route: there is one of each route.
	Keys      []Key             `json:"keys,omitempty"`
	Overrides []policy.Override `json:"overrides,omitempty"`
	Block     *Block            `json:"block,omitempty"`
	Created   time.Time         `json:"created,omitzero"`
	Updated   time.Time         `json:"updated,omitzero"`
}

// Key is an API key as far as it is kept: the key itself is shown once, when it is made.
type Key struct {
	// Hash is the SHA-256 of the key, in hex.
	Hash    string    `json:"hash"`
	Label   string    `json:"label,omitempty"`
	Created time.Time `json:"created,omitzero"`
	// Expires is when the key ends; zero: never.
	Expires time.Time `json:"expires,omitzero"`
}

// Block refuses every request of a client.
type Block struct {
	// Until is when it ends; zero: when it is lifted.
	Until  time.Time `json:"until,omitzero"`
	Reason string    `json:"reason,omitempty"`
}

// Plan is a plan of the rules.
type Plan struct {
	Name string `json:"name"`
	policy.Plan
}

const addressPrefix = "ip:"

// IsAddress reports whether a client of that name is an address.
func IsAddress(name string) bool { return strings.HasPrefix(name, addressPrefix) }

// ClientID is the id that a user or an address is counted under.
func ClientID(name string) string {
	if IsAddress(name) {
		return name
	}
	return "user:" + name
}

// NameOf is the name of the client with that id: "user:ann" is ann, an address is itself.
func NameOf(client string) (string, error) {
	name := strings.TrimPrefix(client, "user:")
	return name, ValidateName(name)
}

// ValidateName reports what is wrong with the name of a user or an address.
func ValidateName(name string) error {
	text, isAddress := strings.CutPrefix(name, addressPrefix)
	if !isAddress {
		if !policy.ValidName(name) {
			return fmt.Errorf("name: %s; an address is ip:<address> or ip:<prefix>/<bits>", policy.NameProblem)
		}
		return nil
	}
	if prefix, err := netip.ParsePrefix(text); err == nil && prefix.Masked().String() == text {
		return nil
	}
	if addr, err := netip.ParseAddr(text); err == nil && addr.Unmap().WithZone("").String() == text {
		return nil
	}
	return errors.New("name: an address is ip:<address> or ip:<prefix>/<bits> as edges write it, such as ip:192.0.2.7 or ip:2001:db8::/64")
}

// Validate reports the first thing about u that can't be kept. Whether its plan and routes exist is
// the policy's to say.
func (u User) Validate() error {
	if err := ValidateName(u.Name); err != nil {
		return err
	}
	switch {
	case u.Plan != "" && !policy.ValidName(u.Plan):
		return fmt.Errorf("plan: %s", policy.NameProblem)
	case len(u.Keys) > MaxKeys:
		return fmt.Errorf("keys: a user has at most %d", MaxKeys)
	case len(u.Overrides) > MaxOverrides:
		return fmt.Errorf("overrides: a client has at most %d", MaxOverrides)
	case u.Block != nil && len(u.Block.Reason) > MaxNote:
		return fmt.Errorf("block.reason: at most %d bytes", MaxNote)
	case IsAddress(u.Name) && (len(u.Keys) > 0 || u.Plan != "" || u.Admin):
		return errors.New("an address has neither keys nor a plan, and is no admin")
	}
	for _, k := range u.Keys {
		if !ValidHash(k.Hash) {
			return errors.New("keys: hash must be the SHA-256 of the key in 64 hexadecimal digits (printf %s KEY | sha256sum)")
		}
		if len(k.Label) > MaxNote {
			return fmt.Errorf("keys: a label has at most %d bytes", MaxNote)
		}
	}
	return nil
}

// Empty reports whether nothing is left that an address would be kept for.
func (u User) Empty() bool { return len(u.Overrides) == 0 && u.Block == nil }

// NewKey makes an API key of 130 random bits, and what is kept of it.
func NewKey(label string, expires, now time.Time) (secret string, _ Key) {
	secret = "ak_" + strings.ToLower(rand.Text())
	return secret, Key{Hash: HashOf(secret), Label: label, Created: now.UTC(), Expires: expires}
}

// HashOf is the SHA-256 of an API key, in hex.
func HashOf(secret string) string {
	digest := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(digest[:])
}

// ValidHash reports whether hash is a SHA-256 in lower-case hex.
func ValidHash(hash string) bool {
	digest, err := hex.DecodeString(hash)
	return err == nil && len(digest) == sha256.Size && hash == strings.ToLower(hash)
}

// ID is what a key is called by: the beginning of its hash.
func (k Key) ID() string { return k.Hash[:min(12, len(k.Hash))] }

// AddKey adds a key, or replaces what is known of it.
func (u *User) AddKey(k Key) {
	u.DropKey(k.ID())
	u.Keys = append(u.Keys, k)
	slices.SortFunc(u.Keys, func(a, b Key) int { return strings.Compare(a.Hash, b.Hash) })
}

// DropKey removes the key with that ID, and reports whether there was one.
func (u *User) DropKey(id string) bool {
	before := len(u.Keys)
	u.Keys = slices.DeleteFunc(slices.Clone(u.Keys), func(k Key) bool { return k.ID() == id })
	return len(u.Keys) < before
}

// SetOverride puts an override in place of the one of its route.
func (u *User) SetOverride(o policy.Override) {
	u.DropOverride(o.Route)
	u.Overrides = append(u.Overrides, o)
	slices.SortFunc(u.Overrides, func(a, b policy.Override) int { return strings.Compare(a.Route, b.Route) })
}

// DropOverride removes the override of a route ("": over all routes), and reports whether there was one.
func (u *User) DropOverride(route string) bool {
	before := len(u.Overrides)
	u.Overrides = slices.DeleteFunc(slices.Clone(u.Overrides), func(o policy.Override) bool { return o.Route == route })
	return len(u.Overrides) < before
}

// DropExpired removes overrides, keys and a block that have ended. What is stored may hold them for a
// while; nobody obeys them.
func (u *User) DropExpired(now time.Time) {
	u.Overrides = slices.DeleteFunc(slices.Clone(u.Overrides), func(o policy.Override) bool { return !o.Live(now) })
	u.Keys = slices.DeleteFunc(slices.Clone(u.Keys), func(k Key) bool { return ended(k.Expires, now) })
	if u.Block != nil && ended(u.Block.Until, now) {
		u.Block = nil
	}
}

// HasKey reports whether a key of that hash is the user's, and has not ended.
func (u User) HasKey(hash string, now time.Time) bool {
	return slices.ContainsFunc(u.Keys, func(k Key) bool { return k.Hash == hash && !ended(k.Expires, now) })
}

// Rules is how edges treat the client at now, and until when that holds if nothing is changed: zero is
// for ever.
func (u User) Rules(now time.Time) (_ policy.UserRules, until time.Time) {
	next := func(at time.Time) {
		if !at.IsZero() && at.After(now) && (until.IsZero() || at.Before(until)) {
			until = at
		}
	}
	for _, k := range u.Keys {
		next(k.Expires)
	}
	for _, o := range u.Overrides {
		next(o.Expires)
	}
	r := policy.UserRules{Name: u.Name, Plan: u.Plan, Admin: u.Admin}
	if IsAddress(u.Name) {
		r.Name = ""
	}
	if u.Block != nil {
		next(u.Block.Until)
		r.Blocked = !ended(u.Block.Until, now)
	}
	if u.DropExpired(now); len(u.Overrides) > 0 {
		r.Overrides = &u.Overrides
	}
	return r, until
}

func ended(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

// Keys of the bucket.
const (
	userKey    = "user."
	addressKey = "address."
	hashKey    = "key."
	planKey    = "plan."
)

// Patterns of keys.
const (
	AllAddresses = addressKey + ">"
	AllPlans     = planKey + ">"
)

// UserKey is where a user or an address is kept.
func UserKey(name string) string {
	if text, ok := strings.CutPrefix(name, addressPrefix); ok {
		return addressKey + strings.NewReplacer(".", "_", ":", "-").Replace(text)
	}
	return userKey + name
}

// HashKey is where the user of a key is looked up.
func HashKey(hash string) string { return hashKey + hash }

// PlanKey is where a plan is kept.
func PlanKey(name string) string { return planKey + name }

// Record is what a key of the bucket says; one field is set, none where it is gone.
type Record struct {
	User *User
	// Hash and Owner are a key's hash and the name of its user.
	Hash, Owner string
	Plan        *Plan
	// Gone says that what Key names is gone.
	Gone bool
	// Name is the user's, address's or plan's name, also of one that is gone.
	Name string
}

// owner is the wire form under key.<hash>.
type owner struct {
	User string `json:"user"`
}

// ErrMalformed: a record is not what its key promises.
var ErrMalformed = errors.New("rules: malformed record")

// EncodeUser is the record of a user.
func EncodeUser(u User) ([]byte, error) {
	if err := u.Validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return json.Marshal(u)
}

// EncodeOwner is the record of a key's hash.
func EncodeOwner(name string) ([]byte, error) { return json.Marshal(owner{name}) }

// EncodePlan is the record of a plan.
func EncodePlan(p Plan) ([]byte, error) {
	if err := policy.ValidatePlan(p.Name, p.Plan); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return json.Marshal(p)
}

// Decode reads what is kept under key; without data it is gone. Its error is ErrMalformed.
func Decode(key string, data []byte) (Record, error) {
	r := Record{Gone: len(data) == 0}
	kind, name, _ := strings.Cut(key, ".")
	var err error
	switch kind + "." {
	case userKey, addressKey:
		if kind+"." == addressKey {
			name = addressPrefix + strings.NewReplacer("_", ".", "-", ":").Replace(name)
		}
		r.Name = name
		if r.Gone {
			break
		}
		r.User = new(User)
		if err = json.Unmarshal(data, r.User); err == nil {
			err = r.User.Validate()
		}
		if err == nil && r.User.Name != name {
			err = fmt.Errorf("it calls itself %q", r.User.Name)
		}
	case hashKey:
		r.Hash = name
		if r.Gone {
			break
		}
		var o owner
		if err = json.Unmarshal(data, &o); err == nil {
			err = ValidateName(o.User)
		}
		r.Owner = o.User
	case planKey:
		r.Name = name
		if r.Gone {
			break
		}
		r.Plan = new(Plan)
		if err = json.Unmarshal(data, r.Plan); err == nil {
			err = policy.ValidatePlan(name, r.Plan.Plan)
		}
		if err == nil && r.Plan.Name != name {
			err = fmt.Errorf("it calls itself %q", r.Plan.Name)
		}
	default:
		err = errors.New("no such kind of key")
	}
	if err != nil {
		return Record{}, fmt.Errorf("%w: %s: %w", ErrMalformed, key, err)
	}
	return r, nil
}

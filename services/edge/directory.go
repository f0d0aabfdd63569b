package edge

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/pkg/rules"
)

const (
	// unknownFor is how long a key that nobody has is remembered as such.
	unknownFor = 10 * time.Second
	// sickFor is how long nothing is looked up after a look-up without an answer.
	sickFor = time.Second
	// maxLookups bounds the look-ups under way: invented keys must not become a flood on NATS.
	maxLookups = 64
	// maxAddresses bounds the addresses with rules of their own, whatever the bucket says.
	maxAddresses = 20_000
	// keepEvery is how often what is known is written to disk, if it has changed.
	keepEvery = 2 * time.Second
)

// directory knows the clients that this edge has seen, by their keys, and every address that has rules
// of its own. What it does not know it looks up in the rules bucket, within a bound; it is told of
// changes, refreshes what is old, and keeps all of it on disk for a start without NATS.
type directory struct {
	bus     *bus.Bus
	dir     string
	refresh time.Duration // how old a look-up may be
	timeout time.Duration // how long a request may wait for one
	metrics *metrics
	log     zerolog.Logger
	now     func() time.Time
	// plans is told of the rules' plans, changed of a client whose rules are others now.
	plansChanged func(map[string]policy.Plan)
	changed      func(client string)

	lookups chan struct{}
	changes atomic.Uint64 // heard of so far
	sick    atomic.Int64  // Unix nanoseconds until which nothing is looked up

	addresses atomic.Pointer[map[string]*known] // by client id; replaced, never changed

	mu      sync.Mutex
	byHash  *lru.Cache[string, *known]    // whom a key belongs to
	byName  map[string]map[string]bool    // the hashes in byHash by their user
	unknown *lru.Cache[string, time.Time] // keys that are nobody's, and until when that is believed
	pending map[string]chan struct{}      // look-ups under way, by hash
	plans   map[string]policy.Plan
	dirty   bool
}

// known is one client as it was last heard of. It is never changed.
type known struct {
	user  rules.User
	rules policy.UserRules
	// until is when rules must be made anew from user, fresh until when the bucket need not be asked.
	until, fresh time.Time
}

func newDirectory(cfg Config, b *bus.Bus, m *metrics, log zerolog.Logger) (*directory, error) {
	d := &directory{
		bus: b, dir: cfg.DataDir, refresh: cfg.RulesRefresh, timeout: cfg.RulesTimeout, metrics: m, log: log, now: time.Now,
		plansChanged: func(map[string]policy.Plan) {}, changed: func(string) {},
		lookups: make(chan struct{}, maxLookups),
		byName:  map[string]map[string]bool{}, pending: map[string]chan struct{}{}, plans: map[string]policy.Plan{},
	}
	var err error
	if d.byHash, err = lru.NewWithEvict(cfg.MaxUsers, d.evicted); err != nil {
		return nil, err
	}
	if d.unknown, err = lru.New[string, time.Time](cfg.MaxUsers); err != nil {
		return nil, err
	}
	d.addresses.Store(&map[string]*known{})
	return d, nil
}

// evicted runs within a call to byHash, with mu held.
func (d *directory) evicted(hash string, k *known) {
	if hashes := d.byName[k.user.Name]; hashes != nil {
		if delete(hashes, hash); len(hashes) == 0 {
			delete(d.byName, k.user.Name)
		}
	}
}

// User implements admission.Directory. It waits for a look-up only for a key it has never seen, and
// for no longer than its timeout; without an answer the key counts as unknown for this request.
func (d *directory) User(digest [sha256.Size]byte) (policy.UserRules, bool) {
	hash := hex.EncodeToString(digest[:])
	now := d.now()
	d.mu.Lock()
	if k, ok := d.byHash.Get(hash); ok {
		if !k.until.IsZero() && !now.Before(k.until) {
			k = d.learn(k.user, k.fresh, hash, now)
		}
		stale := now.After(k.fresh)
		d.mu.Unlock()
		if stale {
			d.ask(hash)
		}
		return k.rules, k.user.HasKey(hash, now)
	}
	until, nobody := d.unknown.Get(hash)
	d.mu.Unlock()
	if nobody && now.Before(until) {
		return policy.UserRules{}, false
	}
	done := d.ask(hash)
	if done == nil {
		return policy.UserRules{}, false
	}
	wait := time.NewTimer(d.timeout)
	defer wait.Stop()
	select {
	case <-done:
	case <-wait.C:
		return policy.UserRules{}, false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if k, ok := d.byHash.Get(hash); ok {
		return k.rules, k.user.HasKey(hash, now)
	}
	return policy.UserRules{}, false
}

// Address implements admission.Directory: the rules of an address, which has few or none.
func (d *directory) Address(client string) policy.UserRules {
	k := (*d.addresses.Load())[client]
	if k == nil {
		return policy.UserRules{}
	}
	if now := d.now(); !k.until.IsZero() && !now.Before(k.until) {
		r, _ := k.user.Rules(now)
		return r
	}
	return k.rules
}

// ask looks a key up, unless that is under way; the channel closes when it is over. nil: it can't be now.
func (d *directory) ask(hash string) <-chan struct{} {
	if d.now().UnixNano() < d.sick.Load() || !d.bus.Connected() {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if done := d.pending[hash]; done != nil {
		return done
	}
	select {
	case d.lookups <- struct{}{}:
	default:
		return nil
	}
	done := make(chan struct{})
	d.pending[hash] = done
	go func() {
		defer func() { <-d.lookups }()
		d.lookUp(hash)
		d.mu.Lock()
		delete(d.pending, hash)
		d.mu.Unlock()
		close(done)
	}()
	return done
}

func (d *directory) lookUp(hash string) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*d.timeout)
	defer cancel()
	now := d.now()
	// What was read may be older than a change that came in meanwhile and found nobody to change.
	fresh := now
	var u rules.User
	var err error
	for range 3 {
		before := d.changes.Load()
		if u, err = d.fetch(ctx, hash); d.changes.Load() == before {
			fresh = now.Add(d.refresh)
			break
		}
	}
	switch {
	case err == nil && u.HasKey(hash, now):
		d.mu.Lock()
		was, _ := d.byHash.Peek(hash)
		d.learn(u, fresh, hash, now)
		d.mu.Unlock()
		if was != nil && !reflect.DeepEqual(was.user, u) {
			d.changed(rules.ClientID(u.Name))
		}
	case err == nil || errors.Is(err, bus.ErrNotFound):
		d.mu.Lock()
		d.byHash.Remove(hash)
		d.unknown.Add(hash, now.Add(unknownFor))
		d.dirty = true
		d.mu.Unlock()
	default:
		d.sick.Store(d.now().Add(sickFor).UnixNano())
		d.metrics.lookupErrors.Inc()
		d.log.Warn().Err(err).Msg("a client can't be looked up; what is known goes on")
	}
}

// fetch reads whom a key belongs to, as far as the bucket says; bus.ErrNotFound: nobody.
func (d *directory) fetch(ctx context.Context, hash string) (rules.User, error) {
	r, err := d.get(ctx, rules.HashKey(hash))
	if err != nil {
		return rules.User{}, err
	}
	if r, err = d.get(ctx, rules.UserKey(r.Owner)); err != nil {
		return rules.User{}, err
	}
	return *r.User, nil
}

func (d *directory) get(ctx context.Context, key string) (rules.Record, error) {
	m, err := d.bus.Get(ctx, events.StreamRules, events.SubjectRules(key))
	if err != nil {
		return rules.Record{}, err
	}
	r, err := rules.Decode(key, m.Data)
	if err == nil && r.Gone {
		err = bus.ErrNotFound
	}
	return r, err
}

// learn keeps what u says of the key with that hash; mu is held.
func (d *directory) learn(u rules.User, fresh time.Time, hash string, now time.Time) *known {
	k := knownAs(u, fresh, now)
	d.unknown.Remove(hash)
	d.byHash.Add(hash, k)
	if d.byName[u.Name] == nil {
		d.byName[u.Name] = map[string]bool{}
	}
	d.byName[u.Name][hash] = true
	d.dirty = true
	return k
}

func knownAs(u rules.User, fresh, now time.Time) *known {
	k := &known{user: u, fresh: fresh}
	k.rules, k.until = u.Rules(now)
	return k
}

// follow hears of changes until ctx ends: of all addresses and plans as they stand, and of users and
// keys as they change.
func (d *directory) follow(ctx context.Context) {
	both := make(chan struct{})
	go func() {
		defer close(both)
		followStream(ctx, d.bus, events.StreamRules, d.log, func(string) func(bus.Message) { return d.take },
			bus.Subjects(events.SubjectRules(rules.AllAddresses), events.SubjectRules(rules.AllPlans)))
	}()
	d.followChanges(ctx)
	<-both
}

// followChanges begins where the bucket ends: what lies there is looked up when it is asked for.
func (d *directory) followChanges(ctx context.Context) {
	for ctx.Err() == nil {
		state, err := d.bus.Stream(ctx, events.StreamRules)
		if err == nil {
			d.distrust()
			err = d.bus.Follow(ctx, events.StreamRules, bus.FromSeq(state.Last+1), func(m bus.Message) error {
				d.take(m)
				return nil
			}, bus.OfStream(state.ID))
		}
		if ctx.Err() != nil {
			return
		}
		d.log.Debug().Err(err).Msg("the rules can't be followed now")
		select {
		case <-ctx.Done():
		case <-time.After(retryEvery):
		}
	}
}

// distrust makes everything known be looked up again when it is next asked for: changes may have
// been missed.
func (d *directory) distrust() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unknown.Purge()
	for _, hash := range d.byHash.Keys() {
		if k, ok := d.byHash.Peek(hash); ok {
			aged := *k
			aged.fresh = time.Time{}
			d.byHash.Add(hash, &aged)
		}
	}
}

// take applies a change of the bucket.
func (d *directory) take(m bus.Message) {
	r, err := rules.Decode(events.RulesKey(m.Subject), m.Data)
	if err != nil {
		d.metrics.badRules.Inc()
		d.log.Error().Err(err).Uint64("seq", m.Seq).Msg("a record of the rules can't be read; what was known stays")
		return
	}
	d.changes.Add(1)
	now := d.now()
	switch {
	case r.Hash != "":
		d.mu.Lock()
		d.unknown.Remove(r.Hash)
		if k, ok := d.byHash.Peek(r.Hash); ok && (r.Gone || k.user.Name != r.Owner) {
			d.byHash.Remove(r.Hash)
			d.dirty = true
		}
		d.mu.Unlock()
	case r.Plan != nil || rules.PlanKey(r.Name) == events.RulesKey(m.Subject):
		d.takePlan(r)
	case rules.IsAddress(r.Name):
		d.takeAddress(r, now)
	default:
		d.takeUser(r, now)
	}
}

func (d *directory) takePlan(r rules.Record) {
	d.mu.Lock()
	plans := maps.Clone(d.plans)
	delete(plans, r.Name)
	if !r.Gone {
		plans[r.Name] = r.Plan.Plan
	}
	same := maps.Equal(plans, d.plans)
	d.plans, d.dirty = plans, true
	d.mu.Unlock()
	if !same {
		d.plansChanged(plans)
	}
}

func (d *directory) takeAddress(r rules.Record, now time.Time) {
	d.mu.Lock()
	addresses := maps.Clone(*d.addresses.Load())
	delete(addresses, r.Name)
	if !r.Gone && len(addresses) < maxAddresses {
		addresses[r.Name] = knownAs(*r.User, now, now)
	}
	d.addresses.Store(&addresses)
	d.dirty = true
	d.mu.Unlock()
	d.changed(r.Name)
}

func (d *directory) takeUser(r rules.Record, now time.Time) {
	d.mu.Lock()
	hashes := slices.Collect(maps.Keys(d.byName[r.Name]))
	if r.User != nil {
		for _, k := range r.User.Keys { // one of them may have been asked for before it was the user's
			d.unknown.Remove(k.Hash)
		}
	}
	for _, hash := range hashes {
		if r.Gone || !r.User.HasKey(hash, now) {
			d.byHash.Remove(hash)
			d.unknown.Add(hash, now.Add(unknownFor))
			d.dirty = true
		} else {
			d.learn(*r.User, now.Add(d.refresh), hash, now)
		}
	}
	d.mu.Unlock()
	if len(hashes) > 0 {
		d.changed(rules.ClientID(r.Name))
	}
}

// kept is what is on disk for a start without NATS.
type kept struct {
	Users     []rules.User `json:"users"` // with the keys that were seen, and those that were not
	Addresses []rules.User `json:"addresses"`
	Plans     []rules.Plan `json:"plans"`
	Seen      []string     `json:"seen"` // hashes, the latest last
}

func rulesFile(dir string) string { return filepath.Join(dir, "rules.snapshot.json") }

// load takes what is on disk; all of it is stale, and looked up again when NATS is there.
func (d *directory) load() {
	data, err := os.ReadFile(rulesFile(d.dir))
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	var k kept
	if err == nil {
		err = json.Unmarshal(data, &k)
	}
	if err != nil {
		d.log.Error().Err(err).Msg("the snapshot of the rules can't be used")
		return
	}
	now := d.now()
	owners := map[string]rules.User{}
	for _, u := range k.Users {
		for _, key := range u.Keys {
			owners[key.Hash] = u
		}
	}
	addresses := map[string]*known{}
	for _, u := range k.Addresses {
		addresses[u.Name] = knownAs(u, time.Time{}, now)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, hash := range k.Seen {
		if u, ok := owners[hash]; ok {
			d.learn(u, time.Time{}, hash, now)
		}
	}
	for _, p := range k.Plans {
		d.plans[p.Name] = p.Plan
	}
	d.addresses.Store(&addresses)
	d.dirty = false
}

// keep writes what is known to disk as it changes, and at the end.
func (d *directory) keep(ctx context.Context) {
	tick := time.NewTicker(keepEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
		if err := d.save(); err != nil {
			d.metrics.snapshotErrors.Inc()
			d.log.Error().Err(err).Str("dir", d.dir).Msg("the rules can't be kept on disk; a start without NATS would know older ones")
		}
	}
}

func (d *directory) save() error {
	d.mu.Lock()
	if !d.dirty {
		d.mu.Unlock()
		return nil
	}
	d.dirty = false
	var k kept
	seen := map[string]bool{}
	for _, hash := range d.byHash.Keys() {
		if c, ok := d.byHash.Peek(hash); ok {
			k.Seen = append(k.Seen, hash)
			if !seen[c.user.Name] {
				seen[c.user.Name] = true
				k.Users = append(k.Users, c.user)
			}
		}
	}
	for name, p := range d.plans {
		k.Plans = append(k.Plans, rules.Plan{Name: name, Plan: p})
	}
	d.mu.Unlock()
	for _, a := range *d.addresses.Load() {
		k.Addresses = append(k.Addresses, a.user)
	}
	data, err := json.Marshal(k)
	if err == nil {
		err = replaceFile(rulesFile(d.dir), data)
	}
	if err != nil {
		d.mu.Lock()
		d.dirty = true
		d.mu.Unlock()
		return fmt.Errorf("%s: %w", rulesFile(d.dir), err)
	}
	return nil
}

package policy

import (
	"cmp"
	"crypto/sha256"
	"net/url"
	"slices"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// Rules is a route ready to decide by.
type Rules struct {
	Name      string
	Upstream  string
	Deny      bool
	Shadow    bool
	Algorithm bucket.Kind
	// Cost, MaxCost and CostPerSecond are in micro-tokens.
	Cost, MaxCost, CostPerSecond int64
	ExposeComputeCost            bool
	MaxBodyBytes                 int64
	// LeaseSize is in micro-tokens, 0: no leases; LeaseTTL in microseconds.
	LeaseSize, LeaseTTL int64
	refund              []Refund
	Fallback            Fallback
	Degrade             Degrade
	// MaxStale bounds how long after its freshness a stored answer may be given out.
	MaxStale     time.Duration
	deferMethods []string
	// Headers are the families of limit headers to send, at least one. CORS is nil where the route has none.
	Headers []HeaderFamily
	CORS    *CORS
	// LLM is nil on routes of another kind; its fields are all set.
	LLM *LLM

	// limits is what each plan's clients are held to ("": no plan); byUser has the users with an override of their own.
	limits map[string][]ScopedLimit
	byUser map[string][]ScopedLimit
}

// Defers reports whether a request of this method may run later.
func (r *Rules) Defers(method string) bool { return slices.Contains(r.deferMethods, method) }

// Refunds reports whether a request that ended so, without a byte of an answer, is paid back.
func (r *Rules) Refunds(end Refund) bool { return slices.Contains(r.refund, end) }

// ScopedLimit is one limit of a client and the bucket it is kept in.
type ScopedLimit struct {
	// Scope is the route's name, bucket.ScopePlan or bucket.ScopeDay.
	Scope string
	bucket.Limit
	// Adaptive limits scale with the upstream's multiplier: a route's do, a plan's rate and daily quota never.
	Adaptive bool
}

// UserRules is a verified client.
type UserRules struct {
	Name  string
	Plan  string
	Admin bool
	// Blocked refuses every request of the client; Overrides replace its limits. They come from the
	// rules (package rules), and an address may have them too.
	Blocked bool
	// Overrides is nil for nearly everybody. It is shared, and never changed.
	Overrides *[]Override
	// RPM and TPM are the user's own; 0: the plan's.
	RPM, TPM int64
}

// UpstreamRules is an upstream ready to be used.
type UpstreamRules struct {
	// URLs has one at least. They are shared by all readers and must not be changed.
	URLs             []*url.URL
	Timeout          time.Duration
	TrustComputeCost bool
	PassHost         bool
	Connections      ConnectionRules
	Health           HealthRules
}

// ConnectionRules are how connections to an upstream are made and kept.
type ConnectionRules struct {
	// HTTP2: nothing but HTTP/2, without TLS too.
	HTTP2          bool
	Max            int
	ConnectTimeout time.Duration
	IdleTimeout    time.Duration
}

// HealthRules is Health with its defaults, in integers: times in microseconds,
// rates and multipliers in millionths. None is zero.
type HealthRules struct {
	SlowP95, FastP95     int64
	ErrorRate, ClearRate int64
	Floor                int64
	// Decrease is a factor, Increase a summand.
	Decrease, Increase int64
	MinSamples, Window int
	MaxAge             int64
}

// Table is a compiled policy. It is immutable and safe for concurrent use;
// what its methods return is shared and must not be changed.
type Table struct {
	version   uint64
	policy    Policy
	routes    map[string]*Rules
	hosts     map[string]paths
	users     map[[sha256.Size]byte]UserRules
	upstreams map[string]UpstreamRules
}

// Version is the config version that the table was compiled from.
func (t *Table) Version() uint64 { return t.version }

// Policy is what the table was compiled from, with its defaults.
func (t *Table) Policy() Policy { return t.policy }

// Route is the route of that name, or nil.
func (t *Table) Route(name string) *Rules { return t.routes[name] }

// User is the owner of the API key with that SHA-256 digest.
func (t *Table) User(keyHash [sha256.Size]byte) (UserRules, bool) {
	u, ok := t.users[keyHash]
	return u, ok
}

// Upstreams are all upstreams by name.
func (t *Table) Upstreams() map[string]UpstreamRules { return t.upstreams }

// LLMQuota is the requests and tokens per minute of a client on routes of kind llm, each that of an
// override, else the user's own, else the plan's; 0: unlimited. An unknown client has the anonymous plan.
func (t *Table) LLMQuota(user UserRules, known bool) (rpm, tpm int64) {
	plan := t.policy.Plans[user.Plan]
	if !known {
		plan = t.policy.Plans[t.policy.AnonymousPlan]
	}
	rpm, tpm = cmp.Or(user.RPM, plan.RPM), cmp.Or(user.TPM, plan.TPM)
	if user.Overrides != nil {
		for _, o := range *user.Overrides {
			if o.Route == "" {
				rpm, tpm = cmp.Or(o.RPM, rpm), cmp.Or(o.TPM, tpm)
			}
		}
	}
	return rpm, tpm
}

// Profile is the profile of that name.
func (t *Table) Profile(name string) (Profile, bool) {
	p, ok := t.policy.Profiles[name]
	return p, ok
}

// Rate is the most calls of a model per second; 0: no bound.
func (p Profile) Rate(model string) int64 {
	for _, m := range p.Models {
		if m.Model == model {
			return m.RequestsPerSecond
		}
	}
	return p.RequestsPerSecond
}

// Limits is what a client is held to on a route, at most one per scope: the
// route's limit, the plan's rate, the daily quota. An unknown client has the
// anonymous plan. Overrides go first; those that have expired must be gone. It is empty when nothing limits the client.
func (t *Table) Limits(r *Rules, user UserRules, known bool) []ScopedLimit {
	plan := user.Plan
	if !known {
		plan = t.policy.AnonymousPlan
	}
	if user.Overrides != nil {
		return t.overridden(r, user, plan)
	}
	if limits, ok := r.byUser[user.Name]; ok && known {
		return limits
	}
	if limits, ok := r.limits[plan]; ok {
		return limits
	}
	return r.limits[""] // a plan that is gone: the route's own limit holds
}

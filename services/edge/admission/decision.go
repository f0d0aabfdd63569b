package admission

import (
	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// Action is what to do with a request.
type Action uint8

const (
	// Forward passes it to the upstream.
	Forward Action = iota
	// Degrade answers yellow: the limit is used up, and its grace has paid for a lesser answer.
	Degrade
	// Deny answers red: a quota is exceeded.
	Deny
	// DenyCost refuses a cost above a limit's capacity, which no wait would cure.
	DenyCost
	// DenyReduced refuses a cost above what a limit holds while its upstream is unwell.
	DenyReduced
	// Forbid refuses every request of the route.
	Forbid
	// Block refuses every request of the client.
	Block
	// TooLarge refuses a body that declares more than the route takes; nothing is charged.
	TooLarge
	// NoRoute: no route matches.
	NoRoute
	// StoreAway: the shared store gives no answer, and the route is closed without it.
	StoreAway
	// Unavailable: the edge can't decide; it has no policy yet.
	Unavailable
)

// Decision is the answer to a Request.
type Decision struct {
	Action Action
	// Route is nil where no route matched.
	Route    *policy.Rules
	Upstream policy.UpstreamRules
	Client   Client
	// Config is the policy version decided by.
	Config uint64

	Tier bucket.Tier
	// Multiplier is the upstream's, in millionths.
	Multiplier int64
	// Exempt: an admin, held to no limit.
	Exempt bool
	// ShadowExceeded: over a limit, and passed by shadow mode.
	ShadowExceeded bool
	// Degraded: the shared store gave no answer, so this edge decided alone.
	Degraded bool

	// LimitName is the scope of the limit that decided: the tightest, or the one that refuses longest.
	LimitName string
	// Known says that the state of that limit is known; Limit and Remaining are its in whole
	// tokens, Reset is in seconds.
	Known                   bool
	Limit, Remaining, Reset int64
	// ResetAt is the moment of Reset by the store's clock, in Unix seconds.
	ResetAt int64
	// RetryAfter is in seconds; 0: no wait helps, or none is needed.
	RetryAfter int64

	// time is the store's clock at the decision, Unix microseconds; now the edge's monotonic one.
	time, now int64
	table     *policy.Table
	charges   []charge
	// limits and states are what was checked; none where nothing is Known. They are shared and
	// elapsed microseconds old, and this edge holds spare micro-tokens of each limit besides (see state).
	limits         []store.Limit
	states         []store.LimitState
	spare, elapsed int64
	// drain is how fast others take from each limit meanwhile, in micro-tokens a microsecond; nil: not at all, or not known.
	drain  []float64
	leased bool
	// refusal is set by Refuse.
	refusal *Refusal
}

// state is what one limit looks like to this client now: what is leased to it here is its own, and
// others' requests since the store's answer are taken to go on as they did before it.
func (d *Decision) state(i int) store.LimitState {
	s, spec := d.states[i], d.limits[i].Spec
	if d.spare > 0 {
		s.Remaining = min(spec.Capacity, s.Remaining+d.spare)
		if spec.Kind == bucket.TokenBucket {
			s.Reset = max(0, s.Reset-int64(float64(d.spare)/float64(spec.Rate)*1e6))
		}
	}
	if d.drain != nil {
		gone := int64(d.drain[i] * float64(d.elapsed))
		s.Remaining = max(min(s.Remaining, d.spare), s.Remaining-gone)
	}
	s.Reset = max(0, s.Reset-d.elapsed)
	if s.Wait > 0 {
		s.Wait = max(1, s.Wait-d.elapsed)
	}
	return s
}

// LimitView is the state of one of a client's limits, as clients are told of it.
type LimitView struct {
	Name string
	// Quota, in whole tokens, comes back in Window seconds; Remaining of it are left. More
	// is there after Next seconds: enough for the request, where it is refused.
	Quota, Window, Remaining, Next int64
}

// Limits are the views of all limits that were checked.
func (d *Decision) Limits() []LimitView {
	views := make([]LimitView, len(d.limits), len(d.limits)+1)
	for i, l := range d.limits {
		s := d.state(i)
		views[i] = LimitView{
			Name:      l.Scope,
			Quota:     l.Spec.Capacity / bucket.One,
			Window:    window(l.Spec),
			Remaining: max(0, s.Remaining/bucket.One),
			Next:      next(l.Spec, s),
		}
	}
	if d.refusal != nil {
		views = append(views, d.refusal.LimitView)
	}
	return views
}

// Leased reports whether the request was paid for by a lease, without asking the store.
func (d *Decision) Leased() bool { return d.leased }

// window is how many seconds it takes at the most until a whole quota is there again.
func window(s bucket.Spec) int64 {
	switch s.Kind {
	case bucket.SlidingWindow:
		return s.Window
	case bucket.DailyQuota:
		return 24 * 60 * 60
	default:
		return max(1, (s.Capacity+s.Rate-1)/s.Rate)
	}
}

// next is how many seconds it takes until more of a limit is there; 0 where all of it is.
func next(spec bucket.Spec, s store.LimitState) int64 {
	switch {
	case s.Tier != bucket.Green && s.Wait != bucket.Never:
		return max(1, seconds(s.Wait))
	case spec.Kind != bucket.TokenBucket:
		return seconds(s.Reset)
	default:
		token := bucket.One - max(0, s.Remaining)%bucket.One
		return min(seconds(s.Reset), (token+spec.Rate-1)/spec.Rate)
	}
}

// reset is a limit's reset in seconds: not before it lets the request pass, where it does not.
func (d *Decision) reset(s store.LimitState) int64 {
	if d.Tier == bucket.Green || s.Tier == bucket.Green {
		return seconds(s.Reset)
	}
	return max(1, seconds(s.Reset), seconds(s.Wait))
}

// charge is what one limit paid.
type charge struct {
	scope  string
	spec   bucket.Spec
	amount int64
	window int64
	how    events.How
}

// read fills in the numbers of the limit that decided.
func (d *Decision) read(limits []store.Limit, states []store.LimitState) {
	d.limits, d.states = limits, states
	i, s := 0, d.state(0)
	for n := 1; n < len(states); n++ {
		other := d.state(n)
		if d.Tier == bucket.Green && fraction(limits[n], other) < fraction(limits[i], s) ||
			d.Tier != bucket.Green && other.Tier != bucket.Green && (s.Tier == bucket.Green || other.Wait > s.Wait) {
			i, s = n, other
		}
	}
	d.Known = true
	d.LimitName = limits[i].Scope
	d.Limit = limits[i].Spec.Capacity / bucket.One
	d.Remaining = max(0, s.Remaining/bucket.One)
	d.Reset = d.reset(s)
	d.ResetAt = seconds(d.time + s.Reset)
	if d.Tier != bucket.Green {
		d.RetryAfter = max(1, seconds(s.Wait))
		d.ResetAt = max(d.ResetAt, seconds(d.time)+d.Reset)
	}
}

// fraction is how much of a limit is left.
func fraction(l store.Limit, s store.LimitState) float64 {
	return float64(s.Remaining) / float64(l.Spec.Capacity)
}

// seconds rounds microseconds up.
func seconds(micros int64) int64 { return (micros + 999_999) / 1_000_000 }

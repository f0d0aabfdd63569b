package admission

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// Sink takes finished requests without ever blocking; false says that it was full.
type Sink interface {
	Add(Record) bool
}

// Local is the store of an edge alone. memstore.Store is one.
type Local interface {
	store.Store
	// Lower leaves a client's bucket with balance and grace at the most, as of now.
	Lower(client string, l store.Limit, balance, grace int64)
}

// Engine decides requests. All its fields are set before the first Decide; it is safe for concurrent use.
type Engine struct {
	Identifier Identifier
	// Store is shared by all edges; Local is this edge's own, on Clock, for when Store is away.
	Store       store.Store
	Local       Local
	Clock       *StoreClock
	Breaker     *Breaker
	Fleet       *Fleet
	Multipliers *Multipliers
	Sink        Sink
	// Directory knows clients beyond the table's; nil: there are none.
	Directory Directory
	// Memory answers without the store where it can; nil: every decision asks the store. Then Tend has to be called.
	Memory *Memory
	// Carried mend what the store has lost; nil: nothing does.
	Carried *Carried
	// Returned, if not nil, hears of clients whose unspent leases went back to the store.
	Returned func(client string)

	table  atomic.Pointer[policy.Table]
	tiers  [bucket.Red + 1]atomic.Uint64
	counts Counts
}

// Counts are what went wrong with the store since the start.
type Counts struct {
	// Unknown calls may or may not have run; they count as charged, and were decided locally.
	Unknown atomic.Uint64
	// Unavailable calls did not run; Unreadable ones found a state that can't be read. Both were decided locally too.
	Unavailable, Unreadable atomic.Uint64
	// Local decisions in all, those of an open breaker included.
	Local atomic.Uint64
	// Open decisions passed a request that no limit had room for; Closed ones refused one unasked.
	Open, Closed atomic.Uint64
	// Healed buckets had been lost by the store, and went on from what this edge had seen of them.
	Healed atomic.Uint64
	// Leases that went back to the store unspent, and those that could not.
	LeasesReturned, LeasesLost atomic.Uint64
}

// Use puts a table in force. Requests under way keep the one they began with.
func (e *Engine) Use(t *policy.Table) { e.table.Store(t) }

// Table is the table in force, nil before the first.
func (e *Engine) Table() *policy.Table { return e.table.Load() }

// Counts are the store's troubles so far.
func (e *Engine) Counts() *Counts { return &e.counts }

// TakeTiers is how many requests were decided by limits since the last call, by tier.
func (e *Engine) TakeTiers() (green, yellow, red uint64) {
	return e.tiers[bucket.Green].Swap(0), e.tiers[bucket.Yellow].Swap(0), e.tiers[bucket.Red].Swap(0)
}

// Degraded reports whether requests are decided locally.
func (e *Engine) Degraded() bool { return e.Breaker.State() == Open }

// Decide admits a request, degrades or refuses it, and charges its limits. What a
// decision forwards must be followed by Finish.
func (e *Engine) Decide(ctx context.Context, r Request) Decision {
	d, limits, limited := e.consider(r)
	if !limited {
		return d
	}
	switch {
	case len(limits) == 0:
	case e.Memory == nil || d.Route.Cost == 0 || d.Route.Shadow, d.Route.Fallback != policy.FallbackLocal && e.Degraded():
		e.limit(ctx, &d, limits, nil, outcome{})
	default:
		e.remember(ctx, &d, query{terms: terms{d.table, d.Route.Name, limits, d.Route.Cost, d.Multiplier}, now: d.now})
	}
	if d.Action != Unavailable && d.Action != StoreAway {
		e.tiers[d.Tier].Add(1)
	}
	return d
}

// consider finds out whose request it is, for which route, and what limits it. It asks no store. What
// is not limited is decided already; what is may have no limits all the same.
func (e *Engine) consider(r Request) (d Decision, limits []policy.ScopedLimit, limited bool) {
	d.Multiplier = bucket.One
	table := e.table.Load()
	if table == nil {
		d.Action = Unavailable
		return d, nil, false
	}
	d.table, d.Config = table, table.Version()
	if d.Route = table.Match(r.Method, r.Host, r.Path); d.Route == nil {
		d.Action = NoRoute
		return d, nil, false
	}
	switch {
	case d.Route.Deny:
		d.Action = Forbid
		return d, nil, false
	case r.Length > d.Route.MaxBodyBytes:
		d.Action = TooLarge
		return d, nil, false
	}
	d.Upstream = table.Upstreams()[d.Route.Upstream]
	d.Multiplier = e.Multipliers.Get(d.Route.Upstream)
	d.Client = e.identify(r, table)
	if d.Client.User.Blocked {
		d.Action = Block
		return d, nil, false
	}
	d.now = e.Clock.Elapsed()
	d.time = e.Clock.at(d.now)
	if d.Client.User.Admin {
		d.Exempt = true
		return d, nil, false
	}
	return d, table.Limits(d.Route, d.Client.User, d.Client.Known), true
}

// identify is the client of a request, with what is known of it.
func (e *Engine) identify(r Request, table *policy.Table) Client {
	users := [...]Users{table, e.Directory}
	known := users[:]
	if e.Directory == nil {
		known = users[:1]
	}
	c := e.Identifier.identify(r, known)
	var buf [maxID]byte
	c.ID = e.Memory.intern(c.appendID(buf[:0]))
	if e.Directory != nil && !c.Known {
		c.User = e.Directory.Address(c.ID)
	}
	return c
}

// Identify is whose request it is. There must be a table.
func (e *Engine) Identify(r Request) Client { return e.identify(r, e.table.Load()) }

// Finish reports how a forwarded request ended.
func (e *Engine) Finish(d Decision, f Facts) { e.Sink.Add(d.record(f)) }

// remember decides d from memory, else by the store, and remembers its answer.
func (e *Engine) remember(ctx context.Context, d *Decision, q query) {
	for {
		o := e.recall(d, &q)
		switch {
		case o.decided:
			return
		case o.join == nil:
			e.limit(ctx, d, q.limits, &q, o)
			return
		}
		q.round++
		if !o.join.joined() {
			q.round = maxRounds
		}
		q.now = e.Clock.Elapsed()
		d.time = e.Clock.at(q.now)
	}
}

// limit decides d by its limits. With q it remembers what the store says.
func (e *Engine) limit(ctx context.Context, d *Decision, scoped []policy.ScopedLimit, q *query, o outcome) {
	check := d.check(scoped)
	var (
		a   answer
		err error
	)
	if q != nil {
		if o.want > 0 {
			check.Want, check.Share = o.want, leaseShare*e.Fleet.Live()
		}
		defer func() { e.learn(d, q, o, a) }() // whatever happens, others may be waiting
	}
	if !d.Route.Shadow && d.refuseCost(scoped, check.Limits) {
		return
	}

	a, err = e.ask(ctx, check, d.Route.Fallback)
	d.Degraded = a.how != events.HowRedis
	switch {
	case errors.Is(err, errClosed):
		d.Action, d.RetryAfter = StoreAway, 1
		return
	case err != nil:
		d.Action = Unavailable
		return
	}
	d.time = a.decision.Now
	d.Tier = a.decision.Tier
	d.spare = a.decision.Granted + o.held
	if d.Tier != bucket.Green && o.early && e.respend(d, q) {
		return
	}
	d.read(a.limits, a.decision.Limits)
	switch {
	case d.Tier == bucket.Green:
	case d.Route.Shadow:
		d.ShadowExceeded = true
		d.RetryAfter = 0
	case d.Tier == bucket.Yellow:
		d.Action = Degrade
		return
	default:
		d.Action = Deny
		return
	}
	d.charges = make([]charge, len(check.Limits))
	for i, l := range check.Limits {
		// What grace paid is no part of the amount: a refund goes to the balance, and must not turn grace into green.
		s := a.decision.Limits[i]
		d.charges[i] = charge{l.Scope, l.Spec, s.Charged - a.decision.Granted, s.Window, a.how}
	}
}

// check is the question to a store.
func (d *Decision) check(scoped []policy.ScopedLimit) store.Check {
	check := store.Check{
		Client: d.Client.ID,
		Limits: make([]store.Limit, len(scoped)),
		Cost:   d.Route.Cost,
		Shadow: d.Route.Shadow,
	}
	for i, l := range scoped {
		m := int64(bucket.One)
		if l.Adaptive {
			m = d.Multiplier
		}
		check.Limits[i] = store.Limit{Scope: l.Scope, Spec: bucket.Effective(l.Limit, m)}
	}
	return check
}

// refuseCost refuses what can't become green by waiting: a cost above the capacity of a
// limit, or above what is left of it while its upstream is unwell. The store is not asked.
func (d *Decision) refuseCost(scoped []policy.ScopedLimit, limits []store.Limit) bool {
	cost := d.Route.Cost
	for _, l := range scoped {
		if cost > l.Capacity*bucket.One {
			d.Action, d.LimitName, d.Limit = DenyCost, l.Scope, l.Capacity
			d.Tier = bucket.Red
			return true
		}
	}
	for i, l := range scoped {
		if cost > limits[i].Spec.Capacity {
			d.Action, d.LimitName, d.Limit = DenyReduced, l.Scope, limits[i].Spec.Capacity/bucket.One
			d.Tier = bucket.Red
			d.RetryAfter = recovery(cost, l.Capacity, d.Multiplier, d.Upstream.Health.Increase)
			return true
		}
	}
	return false
}

// recovery is how many seconds it takes at the least until a limit of capacity tokens
// holds cost again: the multiplier rises by increase (millionths) at most once a second.
func recovery(cost, capacity, m, increase int64) int64 {
	tokens := (cost + bucket.One - 1) / bucket.One
	needed := (tokens*bucket.One + capacity - 1) / capacity // the least m with floor(capacity·m) ≥ tokens
	increase = max(increase, 1)
	return max(1, (needed-m+increase-1)/increase)
}

// answer is a store's decision, and what it was asked by.
type answer struct {
	decision store.Decision
	limits   []store.Limit
	// how is HowRedis for the shared store's decision. It is HowUnknown for a local one where the
	// shared store may have charged too: that counts as charged.
	how events.How
}

// errClosed: the shared store gave no answer, and the route takes no other.
var errClosed = errors.New("admission: the route is closed without the store")

// ask decides by the shared store, or as the route's fallback says where that gives no answer. A call that may
// have run is decided so too: else a store that answers late would admit everything.
func (e *Engine) ask(ctx context.Context, c store.Check, fallback policy.Fallback) (answer, error) {
	// A client that leaves must not end a call that may have charged, nor look like a store that fails.
	ctx = context.WithoutCancel(ctx)
	how := events.HowLocal
	edges := e.Fleet.Live()
	if e.Carried != nil {
		c.Seen = e.Carried.recall(c)
	}
	if pass := e.Breaker.Pass(); pass != Refused {
		decision, err := e.Store.Check(ctx, c)
		e.Breaker.Debit(pass, answers(err))
		switch {
		case err == nil:
			e.Clock.Observe(decision.Now)
			for i, l := range c.Limits {
				at := decision.Limits[i]
				e.Local.Lower(c.Client, store.Limit{Scope: l.Scope, Spec: share(l.Spec, edges, c.Cost)}, at.Remaining/edges, at.Grace/edges)
			}
			e.saw(c, decision)
			return answer{decision, c.Limits, events.HowRedis}, nil
		case errors.Is(err, store.ErrUnknown):
			e.counts.Unknown.Add(1)
			how = events.HowUnknown
		case errors.Is(err, store.ErrUnavailable):
			e.counts.Unavailable.Add(1)
		default:
			e.counts.Unreadable.Add(1)
		}
	}
	if fallback == policy.FallbackClosed {
		e.counts.Closed.Add(1)
		return answer{how: how}, errClosed
	}
	e.counts.Local.Add(1)
	limits := make([]store.Limit, len(c.Limits))
	for i, l := range c.Limits {
		limits[i] = store.Limit{Scope: l.Scope, Spec: share(l.Spec, edges, c.Cost)}
	}
	c.Limits, c.Want, c.Share, c.Seen = limits, 0, 0, nil
	if fallback == policy.FallbackOpen {
		c.Shadow = true // what the share still has is charged
	}
	decision, err := e.Local.Check(ctx, c)
	if fallback == policy.FallbackOpen && decision.Tier != bucket.Green {
		e.counts.Open.Add(1)
		decision.Tier = bucket.Green
	}
	return answer{decision, limits, how}, err
}

// answers reports whether an error is that of a store which decides others: no reason to stop asking it.
func answers(err error) bool {
	switch {
	case errors.Is(err, store.ErrFull), errors.Is(err, store.ErrMoving):
		return true
	default:
		return !errors.Is(err, store.ErrUnknown) && !errors.Is(err, store.ErrUnavailable)
	}
}

// Changed forgets what no longer holds of a bucket that others have changed.
func (e *Engine) Changed(b events.ChangedBucket) {
	if e.Memory != nil {
		e.Memory.Changed(b)
	}
	if e.Carried != nil && b.Why == "" {
		e.Carried.forget(b)
	}
}

// saw takes note of an answer of the shared store.
func (e *Engine) saw(c store.Check, d store.Decision) {
	if e.Carried == nil {
		return
	}
	e.Carried.learn(c, d)
	for _, l := range d.Limits {
		if l.Healed {
			e.counts.Healed.Add(1)
		}
	}
}

// Shares are the tokens that this edge alone would admit at once to a client without a key, by route: of the route's own
// limit. The fleet admits no more than as much on each edge, and each edge's part of the refill.
func (e *Engine) Shares() map[string]int64 {
	shares := make(map[string]int64)
	table := e.table.Load()
	if table == nil {
		return shares
	}
	edges := e.Fleet.Live()
	for name := range table.Policy().Routes {
		r := table.Route(name)
		for _, l := range table.Limits(r, policy.UserRules{}, false) {
			if l.Adaptive && r.Fallback == policy.FallbackLocal {
				shares[name] = share(bucket.Effective(l.Limit, e.Multipliers.Get(r.Upstream)), edges, r.Cost).Capacity / bucket.One
			}
		}
	}
	return shares
}

// share is what one of the live edges may admit alone. It holds a token and a request of
// this cost at the least: an expensive route goes on at the share's rate, and the fleet's
// burst exceeds the limit by at most that on each edge.
func share(s bucket.Spec, edges, cost int64) bucket.Spec {
	least := min((cost+bucket.One-1)/bucket.One*bucket.One, s.Capacity)
	s.Capacity = max(s.Capacity/edges/bucket.One*bucket.One, least, bucket.One)
	s.Grace /= edges
	s.MaxDebt /= edges
	if s.Kind == bucket.TokenBucket {
		s.Rate = max(1, s.Rate/edges)
		s.SlowestRate = max(1, s.SlowestRate/edges)
	}
	return s
}

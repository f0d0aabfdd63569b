package admission

import (
	"context"
	"slices"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
)

const (
	// horizon is how many seconds of a hot key's requests a grant is for: so long, at the most, its
	// tokens lie here while another edge could use them.
	horizon = 2
	// idle is when the tokens of a key that is asked for no more go back, in microseconds. No lease
	// lives for less: its life shortens to this as tokens get scarce.
	idle = int64(time.Second / time.Microsecond)
	// leaseShare says that a grant takes no more than half of this edge's share of what is left.
	leaseShare = 2
	// maxRounds is how often a request waits for a refill before it asks for itself.
	maxRounds = 3
	// TendInterval is how often Tend is to be called.
	TendInterval = 100 * time.Millisecond
)

// grant is tokens that the store charged in advance, to each limit. It is spent from memory, and
// what is left goes back to where it was charged.
type grant struct {
	// granted at first, left now; micro-tokens.
	granted, left int64
	// made and expires are by the edge's monotonic clock, microseconds.
	made, expires int64
	// charges are what one request pays, gens the buckets' generations.
	charges []charge
	gens    []int64
	limits  []store.Limit
	states  []store.LimitState
	drain   []float64 // of each limit, by others; see sighting
}

// flight is a refill under way. retry says that those who waited for it should look again.
type flight struct {
	done  chan struct{}
	retry bool
}

// unspent is a grant's rest on its way back.
type unspent struct {
	client string
	grant  grant
}

// query is one request to the memory.
type query struct {
	terms
	now int64
	// round is how often it has waited for a refill.
	round int
	level float32
}

// tokens is what the key is likely to spend in so many seconds, going by the requests before this one, in micro-tokens.
func (q *query) tokens(seconds float64) float64 {
	return float64(q.level-1) * seconds * float64(q.cost)
}

// outcome is what recall comes to.
type outcome struct {
	decided bool
	// join is a refill to wait for; lead is the asker's own, for want tokens besides.
	join, lead *flight
	want       int64
	// early: the lead has a lease left, for those who don't wait.
	early   bool
	held    int64
	changes uint64
	heard   uint64
	revoked uint64
}

// recall decides d from memory if it can, else says how the store is to be asked.
func (e *Engine) recall(d *Decision, q *query) (o outcome) {
	m := e.Memory
	s, hash := m.shard(d.Client.ID)
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.find(d.Client.ID, q.route)
	if q.round == 0 {
		if k != nil {
			q.level = k.heat.add(q.now)
		} else {
			q.level = s.watch(hash, q.route, q.now)
		}
	}
	o.changes, o.heard = s.changes, m.hearing.state()
	hot := d.Route.LeaseSize > 0 && q.tokens(float64(d.Route.LeaseTTL)/1e6) >= float64(d.Route.LeaseSize)
	if k == nil {
		if !hot {
			return o
		}
		if k = s.add(d.Client.ID, q.terms, m.most, 0, q.now); k == nil {
			return o
		}
		k.heat = heat{q.level, q.now}
	}
	if !k.same(&q.terms) {
		m.revoke(s, k)
		k.denial, k.seen = nil, nil
	}
	k.terms = q.terms
	o.early = hot && k.flight == nil && k.low(q.now)
	if !o.early && m.spend(s, k, d, q) {
		s.hits++
		o.decided = true
		return o
	}
	if n := k.denial; n != nil && !o.early {
		if q.now < n.until && m.hearing.holds(n.heard, n.made, q.now) {
			d.Tier, d.Action = bucket.Red, Deny
			d.elapsed = q.now - n.made
			d.read(n.limits, n.states)
			s.denials++
			o.decided = true
			return o
		}
		k.denial = nil
	}
	switch {
	case q.round >= maxRounds:
	case k.flight != nil:
		o.join = k.flight
	default:
		o.lead = &flight{done: make(chan struct{})}
		k.flight = o.lead
		o.revoked, o.held = k.revoked, k.left()
		if hot {
			o.want = max(d.Route.LeaseSize, int64(min(q.tokens(horizon), bucket.MaxMicro)))
		}
	}
	return o
}

// left is what the key's leases hold.
func (k *key) left() (left int64) {
	for i := range k.grants {
		left += k.grants[i].left
	}
	return left
}

// low reports whether a lease of a well-funded key runs out: time to refill it while it lasts.
func (k *key) low(now int64) bool {
	if len(k.grants) == 0 {
		return false
	}
	left := k.left()
	g := &k.grants[len(k.grants)-1]
	return left*8 < g.granted && left >= k.cost && now < g.expires && remaining(g.limits, g.states) > 0.5
}

// respend decides d by what is left of a lease after all, whose refill got nothing.
func (e *Engine) respend(d *Decision, q *query) bool {
	s, _ := e.Memory.shard(d.Client.ID)
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.find(d.Client.ID, q.route)
	if k == nil || !k.same(&q.terms) {
		return false
	}
	tier := d.Tier
	if d.Tier = bucket.Green; e.Memory.spend(s, k, d, q) {
		d.Degraded = false
		return true
	}
	d.Tier = tier
	return false
}

// spend takes the cost of d from the key's oldest grant that has it.
func (m *Memory) spend(s *memoryShard, k *key, d *Decision, q *query) bool {
	for len(k.grants) > 0 {
		g := &k.grants[0]
		if q.now >= g.expires || g.left < q.cost {
			m.giveBack(k, *g)
			m.drop(s, k)
			continue
		}
		g.left -= q.cost
		newest := &k.grants[len(k.grants)-1]
		d.spare = k.left()
		d.charges, d.leased = g.charges, true
		d.elapsed, d.drain = q.now-newest.made, newest.drain
		d.read(newest.limits, newest.states)
		if g.left == 0 {
			m.drop(s, k)
		}
		return true
	}
	return false
}

// drop forgets the oldest grant.
func (m *Memory) drop(s *memoryShard, k *key) {
	k.grants[0] = grant{}
	if k.grants = k.grants[1:]; len(k.grants) == 0 {
		k.grants = nil
		delete(s.leased, k)
	}
}

// giveBack puts what is left of a grant on its way to the store.
func (m *Memory) giveBack(k *key, g grant) {
	if g.left <= 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.returns = append(m.returns, unspent{k.client, g})
}

// revoke takes a key's grants away.
func (m *Memory) revoke(s *memoryShard, k *key) {
	for _, g := range k.grants {
		m.giveBack(k, g)
	}
	k.grants = nil
	delete(s.leased, k)
}

// learn takes the store's answer to what recall let through: a grant, how long the next request
// would be refused, and the end of the refill.
func (e *Engine) learn(d *Decision, q *query, o outcome, a answer) {
	m := e.Memory
	s, _ := m.shard(d.Client.ID)
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.find(d.Client.ID, q.route)
	known := a.how == events.HowRedis && len(a.decision.Limits) > 0
	if known && o.changes == s.changes && a.decision.Until != 0 {
		until := int64(bucket.MaxWait)
		if a.decision.Until != bucket.Never {
			until = a.decision.Until
		}
		if k == nil {
			k = s.add(d.Client.ID, q.terms, m.most, until, q.now)
		}
		if k != nil && k.same(&q.terms) {
			now := e.Clock.Elapsed()
			k.denial = &denial{made: now, until: now + until, heard: o.heard, limits: a.limits, states: refusing(a.decision.Limits)}
		}
	}
	var drained []float64
	if known && k != nil && o.want > 0 && k.same(&q.terms) { // the others are taken to be as busy as this edge, until more is known of them
		now := e.Clock.Elapsed()
		drained = k.seen.drain(a.decision.Limits, now, q.tokens(1e-6)*float64(e.Fleet.Live()-1))
		k.seen = &sighting{now, a.decision.Limits, drained}
	}
	if known && a.decision.Granted > 0 {
		g := newGrant(d, q, a, e.Clock.Elapsed())
		g.drain = drained
		if k != nil && k.flight == o.lead && k.revoked == o.revoked && k.same(&q.terms) {
			k.grants = append(k.grants, g)
			s.leased[k] = struct{}{}
		} else {
			m.giveBack(&key{client: d.Client.ID}, g)
		}
	}
	if o.lead != nil {
		if k != nil && k.flight == o.lead {
			k.flight = nil
		}
		o.lead.retry = known && a.decision.Tier != bucket.Yellow
		close(o.lead.done)
	}
}

// refusing is states as a denial shows them: what the answer left without room for another of its kind refuses.
func refusing(states []store.LimitState) []store.LimitState {
	out := slices.Clone(states)
	for i := range out {
		if out[i].Wait != 0 {
			out[i].Tier = bucket.Red
		}
	}
	return out
}

// newGrant is what a gave besides the cost of d.
func newGrant(d *Decision, q *query, a answer, now int64) grant {
	life := max(idle, int64(float64(d.Route.LeaseTTL)*remaining(a.limits, a.decision.Limits)))
	g := grant{
		granted: a.decision.Granted, left: a.decision.Granted, made: now, expires: now + min(life, d.Route.LeaseTTL),
		charges: make([]charge, len(a.limits)), gens: make([]int64, len(a.limits)),
		limits: a.limits, states: a.decision.Limits,
	}
	for i, l := range a.limits {
		g.charges[i] = charge{l.Scope, l.Spec, q.cost, a.decision.Limits[i].Window, a.how}
		g.gens[i] = a.decision.Limits[i].Gen
	}
	return g
}

// Tend gives back what was leased and is not spent: of leases that have expired, that nobody asks for,
// that were called back or that another policy has replaced.
func (e *Engine) Tend(ctx context.Context) {
	now, table := e.Clock.Elapsed(), e.Table()
	e.release(ctx, func(k *key, g *grant) bool {
		return now >= g.expires || now-k.heat.at >= idle || k.table != table
	})
}

// Release gives every lease back, for the end.
func (e *Engine) Release(ctx context.Context) {
	e.release(ctx, func(*key, *grant) bool { return true })
}

func (e *Engine) release(ctx context.Context, due func(*key, *grant) bool) {
	m := e.Memory
	if m == nil {
		return
	}
	for i := range m.shards {
		s := &m.shards[i]
		s.mu.Lock()
		for k := range s.leased {
			kept := k.grants[:0]
			for _, g := range k.grants {
				if due(k, &g) {
					m.giveBack(k, g)
				} else {
					kept = append(kept, g)
				}
			}
			if k.grants = kept; len(kept) == 0 {
				k.grants = nil
				delete(s.leased, k)
			}
		}
		s.mu.Unlock()
	}
	m.mu.Lock()
	returns := m.returns
	m.returns = nil
	m.mu.Unlock()
	for _, u := range returns {
		e.giveBack(ctx, u)
	}
}

// giveBack returns a grant's rest to the store, once: where that fails it is lost to the client.
func (e *Engine) giveBack(ctx context.Context, u unspent) {
	err := store.ErrUnavailable
	if e.Breaker.State() != Open {
		r := store.Return{Client: u.client, Amount: u.grant.left, Limits: make([]store.Returned, len(u.grant.charges))}
		for i, c := range u.grant.charges {
			r.Limits[i] = store.Returned{Limit: store.Limit{Scope: c.scope, Spec: c.spec}, Window: c.window, Gen: u.grant.gens[i]}
		}
		err = e.Store.Return(ctx, r)
	}
	if err != nil {
		e.counts.LeasesLost.Add(1)
		return
	}
	e.counts.LeasesReturned.Add(1)
	if e.Returned != nil {
		e.Returned(u.client)
	}
}

// joined waits for a refill, and says whether looking again makes sense.
func (f *flight) joined() bool {
	<-f.done
	return f.retry
}

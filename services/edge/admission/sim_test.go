package admission_test

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/internal/history"
	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// sim is a fleet of edges on one store, all on one clock that the simulation moves: the same seed
// makes the same run.
type sim struct {
	now    int64 // Unix microseconds
	store  *ledger
	edges  []*admission.Engine
	events schedule

	admitted []history.Request
	// by edge: when it last had a request, and was last admitted one; the longest it went without while tokens lay idle.
	served  []int64
	starved []time.Duration
	asked   int

	// alone is a bucket that decides the same requests without any edge; ideal is how many it admits.
	alone store.Store
	one   store.Check
	ideal int
}

// ledger is a store that writes down how many tokens are leased out, and counts calls.
type ledger struct {
	store.Store
	sim    *sim
	checks int
	steps  []step // of what is granted and not spent nor returned
}

// step is a change of what is leased out.
type step struct {
	at     int64
	tokens int64
}

func (l *ledger) Check(ctx context.Context, c store.Check) (store.Decision, error) {
	l.checks++
	d, err := l.Store.Check(ctx, c)
	if err == nil && d.Granted > 0 {
		l.steps = append(l.steps, step{l.sim.now, d.Granted / bucket.One})
	}
	return d, err
}

func (l *ledger) Return(ctx context.Context, r store.Return) error {
	l.steps = append(l.steps, step{l.sim.now, -r.Amount / bucket.One})
	return l.Store.Return(ctx, r)
}

// leased is what is leased out after all steps up to at.
func (l *ledger) leased() int64 {
	var sum int64
	for _, s := range l.steps {
		sum += s.tokens
	}
	return sum
}

type schedule []event

type event struct {
	at  int64
	run func()
}

func (s schedule) Len() int           { return len(s) }
func (s schedule) Less(i, j int) bool { return s[i].at < s[j].at }
func (s schedule) Swap(i, j int)      { s[i], s[j] = s[j], s[i] }
func (s *schedule) Push(x any)        { *s = append(*s, x.(event)) }
func (s *schedule) Pop() any {
	last := (*s)[len(*s)-1]
	*s = (*s)[:len(*s)-1]
	return last
}

func (s *sim) every(interval int64, run func()) {
	var again func()
	next := s.now
	again = func() {
		run()
		next += interval
		heap.Push(&s.events, event{next, again})
	}
	again()
}

// newSim is a fleet of so many edges that obey doc. With apart each edge has a store of its own: the planted bug.
func newSim(t testing.TB, edges int, doc string, apart bool) *sim {
	s := &sim{now: startTime, served: make([]int64, edges), starved: make([]time.Duration, edges)}
	micros := func() int64 { return s.now }
	clock := func() time.Time { return time.UnixMicro(s.now) }
	s.store = &ledger{Store: memstore.New(micros), sim: s}
	table := compile(t, doc)
	s.alone = memstore.New(micros)
	s.one = store.Check{Client: "c", Cost: bucket.One, Limits: []store.Limit{{Scope: "r", Spec: bucket.Effective(table.Limits(table.Route("r"), policy.UserRules{}, false)[0].Limit, bucket.One)}}}
	for i := range edges {
		storeClock := admission.NewStoreClock(clock)
		e := &admission.Engine{
			Identifier:  admission.Identifier{IPv6Bits: 64},
			Store:       s.store,
			Local:       memstore.New(storeClock.Micros),
			Clock:       storeClock,
			Breaker:     admission.NewBreaker(time.Now, nil),
			Fleet:       admission.NewFleet(fmt.Sprint(i)),
			Multipliers: admission.NewMultipliers(clock),
			Memory:      admission.NewMemory(admission.DefaultMemory),
			Returned: func(client string) {
				for _, e := range s.edges {
					e.Memory.Changed(events.ChangedBucket{Client: client, Why: events.ChangedGain})
				}
			},
		}
		if apart {
			e.Store = &ledger{Store: memstore.New(micros), sim: s}
		}
		e.Use(table)
		s.edges = append(s.edges, e)
		s.every(1_000_000, func() {
			for j := range edges {
				e.Fleet.Heard(fmt.Sprint(j), false, clock())
			}
		})
		s.every(250_000, func() { e.Memory.Echo(e.Clock.Elapsed(), false) })
		s.every(100_000, func() { e.Tend(context.Background()) })
	}
	return s
}

// load sends edge i so many requests a second, one after half to one and a half times the mean pause.
func (s *sim) load(rng *rand.Rand, i int, rate float64) {
	pause := func() int64 { return int64((0.5 + rng.Float64()) / rate * 1e6) }
	var again func()
	again = func() {
		s.request(i)
		heap.Push(&s.events, event{s.now + pause(), again})
	}
	heap.Push(&s.events, event{s.now + int64(rng.Float64()/rate*1e6), again})
}

func (s *sim) request(i int) {
	s.asked++
	if s.alone != nil {
		if d, err := s.alone.Check(context.Background(), s.one); err == nil && d.Tier == bucket.Green {
			s.ideal++
		}
	}
	d := s.edges[i].Decide(context.Background(), admission.Request{
		Method: "GET", Path: "/r", Header: http.Header{}, Peer: netip.MustParseAddr("192.0.2.1"),
	})
	if d.Action != admission.Forward {
		// Without a token, while others hold some unspent: how long already.
		if s.store.leased() > 0 {
			s.starved[i] = max(s.starved[i], time.Duration(s.now-s.served[i])*time.Microsecond)
		} else {
			s.served[i] = s.now
		}
		return
	}
	s.served[i] = s.now
	at := time.Duration(s.now-startTime) * time.Microsecond
	s.admitted = append(s.admitted, history.Request{Start: at, End: at, Cost: 1})
	if l, ok := s.edges[i].Store.(*ledger); ok && d.Leased() {
		l.steps = append(l.steps, step{s.now, -1})
	}
}

func (s *sim) run(d time.Duration) {
	until := s.now + d.Microseconds()
	for len(s.events) > 0 && s.events[0].at <= until {
		e := heap.Pop(&s.events).(event)
		s.now = e.at
		e.run()
	}
	s.now = until
	for i := range s.served { // who did not ask did not starve
		s.served[i] = max(s.served[i], startTime)
	}
}

// limit is the bound of docs/consistency.md: with what was leased when an interval began.
func (s *sim) limit(capacity int64, rate float64) history.Limit {
	return history.Limit{Capacity: capacity, Rate: rate, Leased: leasedOf(s.store.steps, startTime)}
}

// leasedOf is how much was leased out just before a moment of a run that began at begun.
func leasedOf(steps []step, begun int64) func(at time.Duration) int64 {
	steps = slices.Clone(steps)
	slices.SortStableFunc(steps, func(a, b step) int { return cmp.Compare(a.at, b.at) })
	for i := 1; i < len(steps); i++ {
		steps[i].tokens += steps[i-1].tokens
	}
	return func(at time.Duration) int64 {
		i, _ := slices.BinarySearchFunc(steps, begun+at.Microseconds(), func(s step, at int64) int { return cmp.Compare(s.at, at) })
		if i == 0 {
			return 0
		}
		return steps[i-1].tokens
	}
}

func limitDoc(capacity int64, rate float64, more string) string {
	return doc(fmt.Sprintf("  r: {path: /r, upstream: up, degrade: off, capacity: %d, refill_rate: %g%s}", capacity, rate, more))
}

// At twice the limit's rate for a minute a fleet admits 98 to 100 % of C + R·t (of what a bucket alone
// admits of the same requests, where that is less: a token that comes while the bucket is full is nobody's),
// and in no interval more than the bound. Nobody goes without for long while others hold tokens.
func TestFleetIsFairAndExact(t *testing.T) {
	t.Parallel()
	const seconds = 60
	for _, shape := range []struct {
		capacity int64
		rate     float64
	}{{1, 5}, {4, 2}, {10, 1}, {20, 10}, {50, 100}, {400, 50}, {200, 100}} {
		for name, shares := range map[string][]float64{"even": {1, 1, 1, 1}, "uneven": {10, 5, 2, 1}, "lopsided": {100, 1, 1, 1}} {
			t.Run(fmt.Sprintf("C=%d,R=%g,%s", shape.capacity, shape.rate, name), func(t *testing.T) {
				t.Parallel()
				seeds := uint64(3)
				if shape.rate > 20 { // the checker looks at every pair of requests
					seeds = 1
				}
				for seed := range seeds {
					s := overload(t, seed, shape.capacity, shape.rate, shares, seconds, false)
					full := float64(shape.capacity) + shape.rate*seconds
					got := float64(len(s.admitted))
					if got < 0.98*min(full, float64(s.ideal)) || got > full {
						t.Errorf("seed %d: %g of %g admitted, %d by a bucket alone", seed, got, full, s.ideal)
					}
					if err := history.Check(s.admitted, s.limit(shape.capacity, shape.rate)); err != nil {
						t.Errorf("seed %d: %v", seed, err)
					}
					for i, d := range s.starved {
						if d > 2*time.Second {
							t.Errorf("seed %d: edge %d went without for %v while tokens lay idle elsewhere", seed, i, d)
						}
					}
					if seed == 0 {
						t.Logf("%.2f %% admitted (%.2f %% of a bucket alone), %d calls for %d requests, without at the most %v",
							100*got/full, 100*got/float64(s.ideal), s.store.checks, s.asked, slices.Max(s.starved))
					}
				}
			})
		}
	}
}

// overload is a fleet at twice the rate of its limit.
func overload(t testing.TB, seed uint64, capacity int64, rate float64, shares []float64, seconds int, apart bool) *sim {
	s := newSim(t, len(shares), limitDoc(capacity, rate, ""), apart)
	rng := rand.New(rand.NewPCG(seed, 4))
	total := 0.0
	for _, x := range shares {
		total += x
	}
	for i, x := range shares {
		s.load(rng, i, 2*rate*x/total)
	}
	s.run(time.Duration(seconds) * time.Second)
	return s
}

// What the checker is for: edges that each count for themselves.
func TestFleetCountingApartIsCaught(t *testing.T) {
	t.Parallel()
	s := overload(t, 1, 20, 10, []float64{1, 1, 1, 1}, 20, true)
	var v *history.Violation
	if err := history.Check(s.admitted, s.limit(20, 10)); !errors.As(err, &v) {
		t.Fatalf("got %v, want a violation", err)
	}
}

// A hot, well-funded key costs the store at most two calls for a hundred requests, a cold one leases nothing.
func TestHotKeysAskSeldom(t *testing.T) {
	t.Parallel()
	for name, shape := range map[string]struct {
		edges          int
		capacity, rate int64
		load           float64 // of each edge
	}{"one edge": {1, 1000, 500, 300}, "four": {4, 2000, 1000, 150}, "slow refill": {2, 10_000, 10, 50}, "fast": {4, 100_000, 10_000, 2000}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSim(t, shape.edges, limitDoc(shape.capacity, float64(shape.rate), ""), false)
			rng := rand.New(rand.NewPCG(1, 1))
			for i := range shape.edges {
				s.load(rng, i, shape.load)
			}
			s.run(30 * time.Second)
			if calls := float64(s.store.checks) / float64(s.asked); calls > 0.02 || len(s.admitted) != s.asked {
				t.Errorf("%.4f calls a request, %d of %d admitted", calls, len(s.admitted), s.asked)
			} else {
				t.Logf("%.4f calls a request", calls)
			}
		})
	}
	t.Run("cold", func(t *testing.T) {
		t.Parallel()
		s := newSim(t, 4, limitDoc(1000, 100, ""), false)
		rng := rand.New(rand.NewPCG(1, 1))
		for i := range 4 {
			s.load(rng, i, 1.3)
		}
		s.run(30 * time.Second)
		if len(s.store.steps) > 0 || s.store.checks != s.asked {
			t.Errorf("%d leases, %d calls for %d requests", len(s.store.steps), s.store.checks, s.asked)
		}
	})
}

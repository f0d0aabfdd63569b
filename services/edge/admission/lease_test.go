package admission_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// remembering is a rig whose engine has a memory, hears of changes, and counts what is granted and given back.
type remembering struct {
	*rig
	tokens *tokens
	greens int64 // of TakeTiers
}

// tokens counts whole tokens that go out as leases and come back.
type tokens struct {
	store.Store
	granted, returned int64
	returns           int
}

func (s *tokens) Check(ctx context.Context, c store.Check) (store.Decision, error) {
	d, err := s.Store.Check(ctx, c)
	s.granted += d.Granted / bucket.One
	return d, err
}

func (s *tokens) Return(ctx context.Context, r store.Return) error {
	s.returns++
	s.returned += r.Amount / bucket.One
	return s.Store.Return(ctx, r)
}

func newRemembering(t testing.TB, doc string) *remembering {
	r := newRig(t, doc)
	r.Memory = admission.NewMemory(admission.DefaultMemory)
	counted := &tokens{Store: r.store.Store}
	r.store.Store = counted
	r.Memory.Echo(1, false)
	return &remembering{rig: r, tokens: counted}
}

// wait moves the clock; echoes come back all the while.
func (r *remembering) wait(d time.Duration) {
	for d > 0 {
		step := min(d, 100*time.Millisecond)
		r.rig.wait(step)
		r.Memory.Echo(r.Clock.Elapsed(), false)
		d -= step
	}
}

// asks asks n times, with a pause before each, and tells how many were green.
func (r *remembering) asks(n int, pause time.Duration) (green int) {
	for range n {
		r.wait(pause)
		if d := r.ask("/r", "bob"); d.Action == admission.Forward && !d.ShadowExceeded {
			green++
		}
	}
	return green
}

// left is what the store holds of a client's limits, in whole tokens: a peek at what was last asked for.
func (r *remembering) left(t testing.TB) []int64 {
	t.Helper()
	c := r.store.last
	c.Cost, c.Want, c.Share = 0, 0, 0
	d, err := r.tokens.Store.Check(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	out := make([]int64, len(d.Limits))
	for i, l := range d.Limits {
		out[i] = l.Remaining / bucket.One
	}
	return out
}

const roomy = `  r: {path: /r, upstream: up, capacity: 1000, refill_rate: 0.000001}`

// Hits are counted to the token, told truthfully, charged in their events, and what is not spent goes back once.
func TestLeaseIsExact(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(roomy))
	for i := range int64(300) {
		r.wait(10 * time.Millisecond)
		d := r.ask("/r", "bob")
		if d.Action != admission.Forward || d.Remaining != 999-i || d.Limit != 1000 {
			t.Fatalf("request %d: %+v", i, viewOf(d))
		}
		if l := d.Limits(); len(l) != 1 || l[0].Remaining != 999-i {
			t.Fatalf("request %d: limits %+v", i, l)
		}
		r.Finish(d, admission.Facts{ID: "x", Status: 200, Outcome: "ok"})
	}
	if r.store.calls > 20 {
		t.Errorf("%d calls for 300 requests", r.store.calls)
	}
	for _, rec := range r.records {
		c := rec.Response.Charges
		if len(c) != 1 || c[0].Amount != bucket.One || c[0].How != events.HowRedis || rec.Response.Time == 0 {
			t.Fatalf("charges %+v", c)
		}
	}
	if out := 700 - r.left(t)[0]; out <= 0 || r.tokens.granted-r.tokens.returned != 300-int64(r.store.calls)+out {
		t.Errorf("%d granted, %d returned, %d calls, %d out", r.tokens.granted, r.tokens.returned, r.store.calls, out)
	}
	for range 3 { // the second finds nothing
		r.Release(context.Background())
	}
	if left := r.left(t)[0]; left != 700 || r.tokens.returns != 1 {
		t.Errorf("%d left after %d returns, want 700 after 1", left, r.tokens.returns)
	}
}

// A lease that nobody asks for goes back after a second, one that is asked for slowly when it expires.
func TestLeaseEnds(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(roomy))
	r.asks(20, 10*time.Millisecond)
	out := 980 - r.left(t)[0]
	if out <= 0 {
		t.Fatal("nothing is leased")
	}
	r.wait(900 * time.Millisecond)
	r.Tend(context.Background())
	if left := r.left(t)[0]; left != 980-out {
		t.Errorf("%d went back before a second", left-980+out)
	}
	r.wait(200 * time.Millisecond)
	r.Tend(context.Background())
	if left := r.left(t)[0]; left != 980 {
		t.Errorf("idle: %d left, want 980", left)
	}
	// Asked for all the time, but hardly: its life ends.
	r.asks(20, 10*time.Millisecond)
	r.wait(900 * time.Millisecond)
	calls := r.store.calls
	for range 6 {
		r.asks(1, 900*time.Millisecond)
		r.Tend(context.Background())
	}
	if left := r.left(t)[0]; left != 980-26 || r.store.calls == calls {
		t.Errorf("expired: %d left, want %d, %d calls", left, 980-26, r.store.calls-calls)
	}
	// What has expired is not spent, whether tended to or not.
	r.asks(20, 10*time.Millisecond)
	calls = r.store.calls
	r.rig.wait(6 * time.Second)
	if d := r.ask("/r", "bob"); r.store.calls != calls+1 || d.Leased() {
		t.Error("spent from a lease that had expired")
	}
}

// A grant that arrives while a lease lives is added to it: nothing of either is lost.
func TestGrantIsAddedToALivingLease(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(`  r: {path: /r, upstream: up, capacity: 100000, refill_rate: 0.000001}`))
	added := false
	for range 2000 {
		r.rig.wait(time.Millisecond)
		before := r.tokens.granted
		d := r.ask("/r", "bob")
		if d.Action != admission.Forward {
			t.Fatal("refused")
		}
		if r.tokens.granted > before && !d.Leased() && r.held(t) > r.tokens.granted-before {
			added = true
		}
	}
	if !added {
		t.Error("no grant came while a lease lived: the test shows nothing")
	}
	r.Release(context.Background())
	if left := r.left(t)[0]; left != 98_000 {
		t.Errorf("%d left, want 98000: of a lease %d were lost", left, 98_000-left)
	}
}

// held is what is leased out: what the store lacks beyond what was asked for.
func (r *remembering) held(t testing.TB) int64 {
	g, _, _ := r.TakeTiers()
	r.greens += int64(g)
	return 100_000 - r.greens - r.left(t)[0]
}

// Case 1: leases of the old version end, and at most the new capacity is admitted, whenever the rest comes back.
func TestLoweredLimitEndsLeases(t *testing.T) {
	t.Parallel()
	for name, tend := range map[string]bool{"tended at once": true, "tended late": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRemembering(t, doc(roomy))
			r.asks(50, 5*time.Millisecond)
			if r.left(t)[0] >= 950 {
				t.Fatal("nothing is leased")
			}
			r.use(t, doc(`  r: {path: /r, upstream: up, degrade: off, capacity: 10, refill_rate: 0.000001}`))
			if tend {
				r.Tend(context.Background())
			}
			green := 0
			for range 40 {
				r.wait(5 * time.Millisecond)
				d := r.ask("/r", "bob")
				if d.Remaining > 10 || d.Limit != 10 {
					t.Fatalf("%+v", viewOf(d))
				}
				if d.Action == admission.Forward {
					green++
				}
				r.Tend(context.Background())
			}
			if green != 10 {
				t.Errorf("%d admitted after the limit fell to 10", green)
			}
		})
	}
}

// Case 31: versions that change nothing refill nobody, and a lease that is in use goes on.
func TestNoOpVersionsKeepLeases(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(roomy))
	r.asks(20, 5*time.Millisecond)
	calls := r.store.calls
	for range 100 {
		r.use(t, doc(roomy))
		r.asks(1, 5*time.Millisecond)
		r.Tend(context.Background())
	}
	if made := r.store.calls - calls; made > 10 {
		t.Errorf("%d calls over 100 versions that change nothing", made)
	}
	r.use(t, doc(roomy)) // nobody asks under this one
	r.Tend(context.Background())
	if leased := r.Memory.Stats().Leased; leased != 0 {
		t.Errorf("%d leases outlive their version", leased)
	}
	if left := r.left(t)[0]; left != 880 {
		t.Errorf("%d left, want 880", left)
	}
}

// Who is told that a bucket went below zero spends no more of its lease, which goes back; a gain leaves it be.
func TestDebtEndsLeases(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(roomy))
	r.asks(20, 5*time.Millisecond)
	calls := r.store.calls
	r.Memory.Changed(events.ChangedBucket{Client: "user:bob", Scope: "r", Why: events.ChangedGain})
	r.Memory.Changed(events.ChangedBucket{Client: "user:bob", Scope: "other", Why: events.ChangedDebt})
	r.Memory.Changed(events.ChangedBucket{Client: "user:eve", Why: events.ChangedDebt})
	if d := r.ask("/r", "bob"); !d.Leased() || r.store.calls != calls {
		t.Error("a lease ended that had no reason to")
	}
	r.Memory.Changed(events.ChangedBucket{Client: "user:bob", Scope: "r", Why: events.ChangedDebt})
	if d := r.ask("/r", "bob"); d.Leased() || r.store.calls != calls+1 {
		t.Error("a debtor spent from its lease")
	}
	r.Release(context.Background())
	if left := r.left(t)[0]; left != 978 {
		t.Errorf("%d left, want 978", left)
	}
}

// One that the debt overtakes while it is on its way is given back as it arrives.
func TestDebtOvertakesAGrant(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(roomy))
	r.asks(3, 5*time.Millisecond)
	r.tokens.Store = &during{Store: r.tokens.Store, do: func() {
		r.Memory.Changed(events.ChangedBucket{Client: "user:bob", Why: events.ChangedDebt})
	}}
	r.asks(1, 5*time.Millisecond)
	if r.tokens.granted == 0 {
		t.Fatal("nothing was granted")
	}
	if st := r.Memory.Stats(); st.Leased != 0 {
		t.Error("a lease came to life that had been called back")
	}
	r.Release(context.Background())
	if left := r.left(t)[0]; left != 996 {
		t.Errorf("%d left, want 996", left)
	}
}

// during does something while a check is under way.
type during struct {
	store.Store
	do func()
}

func (s *during) Check(ctx context.Context, c store.Check) (store.Decision, error) {
	d, err := s.Store.Check(ctx, c)
	if c.Cost > 0 {
		s.do()
	}
	return d, err
}

// A grant is asked for half of this edge's share of what is left, and lives shorter where little is.
func TestFairShare(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(`  r: {path: /r, upstream: up, capacity: 100, refill_rate: 0.000001, lease_size: 50, lease_seconds: 60}`))
	for _, peer := range []string{"a", "b", "c"} {
		r.Fleet.Heard(peer, false, time.UnixMicro(r.now.Load()))
	}
	r.asks(4, 5*time.Millisecond)
	if c := r.store.last; c.Share != 8 || c.Want != 50*bucket.One {
		t.Errorf("want %d, share %d of 4 edges", c.Want, c.Share)
	}
	if r.tokens.granted != (100-4)/8 {
		t.Errorf("%d granted of 96 left among 4 edges", r.tokens.granted)
	}
}

func TestLeaseLifeShortens(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		spent int
		lives time.Duration
	}{{0, 4 * time.Second}, {900, time.Second}} {
		r := newRemembering(t, doc(roomy+`
  other: {path: /other, upstream: up}`))
		for range c.spent { // before anything is leased
			r.Memory, r.store.last = nil, store.Check{}
			r.ask("/r", "bob")
		}
		r.Memory = admission.NewMemory(admission.DefaultMemory)
		r.asks(4, time.Millisecond)
		if r.tokens.granted == 0 {
			t.Fatal("nothing was granted")
		}
		lived := time.Duration(0)
		for r.tokens.returns == 0 && lived < 10*time.Second {
			r.wait(100 * time.Millisecond)
			lived += 100 * time.Millisecond
			if lived%(900*time.Millisecond) == 0 {
				r.ask("/r", "bob")
			}
			r.Tend(context.Background())
		}
		if lived < c.lives || lived > c.lives+time.Second {
			t.Errorf("with %d of 1000 spent a lease lives for %v, want about %v", c.spent, lived, c.lives)
		}
	}
}

// A lease is of the whole combination of limits: each is charged, each gets its rest back.
func TestLeaseOfSeveralLimits(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, `
upstreams: {up: {url: "http://127.0.0.1:1"}}
anonymous_plan: big
plans: {big: {rate: 0.000001, burst: 500, daily_quota: 400}}
routes:
`+roomy)
	for i := range int64(50) {
		r.wait(5 * time.Millisecond)
		d := r.ask("/r", "")
		if d.Action != admission.Forward || d.LimitName != bucket.ScopeDay || d.Remaining != 399-i || len(d.Limits()) != 3 {
			t.Fatalf("request %d: %+v %+v", i, viewOf(d), d.Limits())
		}
		r.Finish(d, admission.Facts{ID: "x", Status: 200, Outcome: "ok"})
	}
	for _, rec := range r.records {
		for i, c := range rec.Response.Charges {
			if c.Amount != bucket.One || i == 2 && c.Window != r.now.Load()/86_400e6 {
				t.Fatalf("charges %+v", rec.Response.Charges)
			}
		}
	}
	r.Release(context.Background())
	if left := r.left(t); fmt.Sprint(left) != "[950 450 350]" || r.tokens.returns != 1 {
		t.Errorf("left %v after %d returns", left, r.tokens.returns)
	}
}

// Case 35: of a lease of 10, 4 are spent; then Redis is gone for two windows, and back.
func TestPartitionCountsOnce(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(`  r: {path: /r, upstream: up, degrade: off, algorithm: sliding_window, sliding_limit: 20, window_seconds: 10}`))
	first := r.now.Load() / 10e6
	for r.tokens.granted == 0 {
		r.asks(1, 5*time.Millisecond)
	}
	granted := r.tokens.granted
	for range 4 {
		if d := r.ask("/r", "bob"); !d.Leased() {
			t.Fatal("not from the lease")
		} else {
			r.Finish(d, admission.Facts{ID: "x", Status: 200, Outcome: "ok"})
		}
	}
	for _, rec := range r.records {
		if c := rec.Response.Charges[0]; c.Window != first || c.How != events.HowRedis {
			t.Errorf("charged to window %d by %s, want %d", c.Window, c.How, first)
		}
	}
	// The lease goes on without Redis, to its end, and no longer.
	r.store.fail = store.ErrUnavailable
	if d := r.ask("/r", "bob"); !d.Leased() || d.Degraded {
		t.Error("the lease ended with Redis")
	}
	r.wait(6 * time.Second)
	if d := r.ask("/r", "bob"); d.Leased() || !d.Degraded {
		t.Error("the lease outlived its life")
	}
	r.tokens.Store = &failing{r.tokens.Store}
	r.Tend(context.Background())
	if lost := r.Counts().LeasesLost.Load(); lost != 1 || r.tokens.returned != granted-5 {
		t.Errorf("%d leases lost, %d tokens tried to go back, want 1 and %d", lost, r.tokens.returned, granted-5)
	}
	r.wait(20 * time.Second)
	r.store.fail = nil
	r.tokens.Store = r.tokens.Store.(*failing).Store
	r.Tend(context.Background()) // nothing is tried twice
	if r.tokens.returns != 1 {
		t.Errorf("%d returns", r.tokens.returns)
	}
	// 50 at once: one refresh is under way at a time, and at most the limit is admitted.
	g := &gauge{Store: r.store.Store}
	r.Store = g
	var green atomic.Int64
	r.asks(3, time.Millisecond)
	green.Add(3)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if r.ask("/r", "bob").Action == admission.Forward {
				green.Add(1)
			}
		})
	}
	wg.Wait()
	if green.Load() > 20 || g.wanted.most.Load() > 1 {
		t.Errorf("%d admitted of 20; %d refreshes at once", green.Load(), g.wanted.most.Load())
	}
}

// failing returns nothing.
type failing struct{ store.Store }

func (s *failing) Return(context.Context, store.Return) error { return store.ErrUnavailable }

// gauge sees how many calls are under way at once.
type gauge struct {
	store.Store
	mu          sync.Mutex
	all, wanted level
	pause       chan struct{} // if not nil, calls wait for it
}

type level struct{ now, most, calls atomic.Int64 }

func (l *level) enter() {
	l.calls.Add(1)
	n := l.now.Add(1)
	for {
		most := l.most.Load()
		if n <= most || l.most.CompareAndSwap(most, n) {
			return
		}
	}
}

func (g *gauge) Check(ctx context.Context, c store.Check) (store.Decision, error) {
	g.all.enter()
	defer g.all.now.Add(-1)
	if c.Want > 0 {
		g.wanted.enter()
		defer g.wanted.now.Add(-1)
	}
	if g.pause != nil {
		<-g.pause
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.Store.Check(ctx, c)
}

// A refill is one at a time; who comes meanwhile waits for it, and asks nothing where it was enough.
func TestRefillIsJoined(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(`  r: {path: /r, upstream: up, capacity: 1000, refill_rate: 0.000001, lease_size: 60}`))
	g := &gauge{Store: memstore.New(r.now.Load), pause: make(chan struct{}, 1000)}
	r.Store = g
	for range 20 { // cold, then hot: one call each
		g.pause <- struct{}{}
		r.rig.wait(time.Millisecond)
		if r.ask("/r", "bob"); r.Memory.Stats().Leased > 0 {
			break
		}
	}
	for len(g.pause) > 0 {
		<-g.pause
	}
	r.Release(context.Background())
	calls := g.all.calls.Load()
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() { r.ask("/r", "bob") })
	}
	await(t, "refill", func() bool { return g.all.now.Load() > 0 })
	for range 50 {
		g.pause <- struct{}{}
	}
	wg.Wait()
	if made := g.all.calls.Load() - calls; made > 3 || g.all.most.Load() > 1 {
		t.Errorf("%d calls for 50 requests at once, %d at a time", made, g.all.most.Load())
	}
}

// A refill without an answer holds nobody up: those who joined it decide for themselves, all at once, and by
// themselves alone: nothing is leased of what is this edge's.
func TestFailedRefillReleasesItsJoiners(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(roomy))
	r.asks(20, 5*time.Millisecond)
	r.Release(context.Background())
	peek := r.store.last
	g := &gauge{Store: &failingChecks{}, pause: make(chan struct{}, 100)}
	r.Store = g
	var wg sync.WaitGroup
	var degraded, begun atomic.Int64
	for range 50 {
		wg.Go(func() {
			begun.Add(1)
			if r.ask("/r", "bob").Degraded {
				degraded.Add(1)
			}
		})
	}
	await(t, "the refill", func() bool { return begun.Load() == 50 && g.all.now.Load() == 1 })
	time.Sleep(20 * time.Millisecond) // for the others to join it
	g.pause <- struct{}{}
	await(t, "all the others at once", func() bool { return g.all.most.Load() > 30 })
	for range 50 {
		g.pause <- struct{}{}
	}
	wg.Wait()
	if degraded.Load() != 50 || r.Memory.Stats().Leased != 0 {
		t.Errorf("%d of 50 decided alone, %d leases", degraded.Load(), r.Memory.Stats().Leased)
	}
	peek.Cost, peek.Want, peek.Share = 0, 0, 0
	d, err := r.Local.Check(context.Background(), peek)
	if left := d.Limits[0].Remaining / bucket.One; err != nil || left < 900 {
		t.Errorf("%d left of this edge's share after 50 requests, %v", left, err)
	}
}

// Who has waited for three refills that gave nothing waits for no more, and not for fewer.
func TestRefillIsJoinedThreeTimes(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(roomy))
	r.asks(20, 5*time.Millisecond)
	r.Release(context.Background())
	g := &gauge{Store: stub{}, pause: make(chan struct{}, 100)}
	r.Store = g
	var wg sync.WaitGroup
	var begun atomic.Int64
	for range 50 {
		wg.Go(func() {
			begun.Add(1)
			r.ask("/r", "bob")
		})
	}
	await(t, "the first refill", func() bool { return begun.Load() == 50 && g.all.now.Load() == 1 })
	time.Sleep(20 * time.Millisecond) // for the others to join it
	for round := int64(1); round <= 3; round++ {
		await(t, "next refill", func() bool { return g.all.calls.Load() >= round })
		if most := g.all.most.Load(); most != 1 {
			t.Errorf("refill %d: %d calls at once", round, most)
		}
		g.pause <- struct{}{}
	}
	await(t, "all the others at once", func() bool { return g.all.most.Load() > 1 })
	for range 50 {
		g.pause <- struct{}{}
	}
	wg.Wait()
}

func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for begun := time.Now(); !condition(); time.Sleep(time.Millisecond) {
		if time.Since(begun) > 20*time.Second {
			t.Fatalf("no %s within 20 s", what)
		}
	}
}

type failingChecks struct{ store.Store }

func (*failingChecks) Check(context.Context, store.Check) (store.Decision, error) {
	return store.Decision{}, store.ErrUnknown
}

// Shadow mode, peeks, other algorithms and cold clients ask the store each time; off is off.
func TestNoLeaseFor(t *testing.T) {
	t.Parallel()
	for name, route := range map[string]string{
		"shadow": "capacity: 1000, refill_rate: 1, shadow_mode: true",
		"peek":   "capacity: 1000, refill_rate: 1, cost: 0",
		"off":    "capacity: 1000, refill_rate: 1, lease_size: 0",
	} {
		r := newRemembering(t, doc("  r: {path: /r, upstream: up, "+route+"}"))
		r.asks(100, time.Millisecond)
		if r.store.calls != 100 || r.tokens.granted != 0 {
			t.Errorf("%s: %d calls, %d granted", name, r.store.calls, r.tokens.granted)
		}
	}
	r := newRemembering(t, doc(roomy))
	r.asks(20, 700*time.Millisecond)
	if r.store.calls != 20 || r.tokens.granted != 0 {
		t.Errorf("cold: %d calls, %d granted", r.store.calls, r.tokens.granted)
	}
}

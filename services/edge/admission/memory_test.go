package admission_test

import (
	"context"
	"net/http"
	"net/netip"
	"runtime"
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

const tight = `  r: {path: /r, upstream: up, degrade: off, capacity: 2, refill_rate: 0.1}`

// spent is a rig whose client has used its limit up, and been refused.
func spent(t testing.TB, doc string) *remembering {
	t.Helper()
	r := newRemembering(t, doc)
	for range 20 {
		if r.ask("/r", "bob").Action == admission.Deny {
			return r
		}
	}
	t.Fatal("never refused")
	return nil
}

// red asks and wants a denial, with so many calls to the store.
func (r *remembering) red(t *testing.T, what string, calls int) {
	t.Helper()
	before := r.store.calls
	if d := r.ask("/r", "bob"); d.Action != admission.Deny {
		t.Errorf("%s: %+v", what, viewOf(d))
	}
	if made := r.store.calls - before; made != calls {
		t.Errorf("%s: %d calls, want %d", what, made, calls)
	}
}

func (r *remembering) green(t *testing.T, what string) {
	t.Helper()
	if d := r.ask("/r", "bob"); d.Action != admission.Forward {
		t.Errorf("%s: a false denial: %+v", what, viewOf(d))
	}
}

// A denial is answered from memory, with numbers that stay true, until the moment it could turn green.
func TestDenialIsRemembered(t *testing.T) {
	t.Parallel()
	r := spent(t, doc(tight))
	check(t, "at once", r.ask("/r", "bob"), view{Action: admission.Deny, Tier: bucket.Red, LimitName: "r", Known: true, Limit: 2, Reset: 20, Retry: 10})
	r.wait(9500 * time.Millisecond)
	check(t, "later", r.ask("/r", "bob"), view{Action: admission.Deny, Tier: bucket.Red, LimitName: "r", Known: true, Limit: 2, Reset: 11, Retry: 1})
	r.red(t, "from memory", 0)
	r.wait(499_999 * time.Microsecond)
	r.red(t, "a microsecond before", 0)
	r.wait(time.Microsecond)
	r.green(t, "at the moment")
	r.red(t, "after the token is spent", 0) // the answer that took it said so
	if _, _, red := r.TakeTiers(); red < 4 {
		t.Errorf("%d red", red)
	}
}

// With grace the moment is the earlier one, when it could turn yellow.
func TestDenialEndsWhereYellowBegins(t *testing.T) {
	t.Parallel()
	r := spent(t, doc(`  r: {path: /r, upstream: up, capacity: 5, refill_rate: 1}`))
	r.red(t, "from memory", 0)
	for n := 0; ; n++ {
		if n == 1000 {
			t.Fatal("red for good")
		}
		r.wait(time.Millisecond)
		// A bucket of its own that is asked every time says what is right.
		c := r.store.last
		c.Want, c.Share = 0, 0
		now := r.store.calls
		d := r.ask("/r", "bob")
		if d.Tier == bucket.Yellow {
			if n < 800 || n > 850 { // 1 of 1.2 tokens a second
				t.Errorf("yellow after %d ms", n)
			}
			return
		}
		if r.store.calls-now > 1 {
			t.Fatal("asked again at once")
		}
	}
}

// Nothing that gives tokens or changes a limit leaves a denial standing.
func TestNoFalseDenials(t *testing.T) {
	t.Parallel()
	give := func(r *remembering, t *testing.T) { // a settlement's refund, of which nobody hears yet
		c := r.store.last
		shard := store.ShardOf(c.Client)
		if _, err := r.tokens.Begin(t.Context(), shard, "s", 0); err != nil {
			t.Fatal(err)
		}
		if _, err := r.tokens.Settle(t.Context(), store.Settlement{Shard: shard, Stream: "s", Seq: 1, Boot: "b", N: 1, Items: []store.Item{
			{Client: c.Client, Scope: "r", Spec: c.Limits[0].Spec, Delta: -bucket.One, Time: r.now.Load()}}}); err != nil {
			t.Fatal(err)
		}
	}
	changed := func(b events.ChangedBucket) func(*remembering, *testing.T) {
		return func(r *remembering, t *testing.T) { give(r, t); r.Memory.Changed(b) }
	}
	for name, do := range map[string]func(*remembering, *testing.T){
		"a refund":         changed(events.ChangedBucket{Client: "user:bob", Scope: "r", Why: events.ChangedGain}),
		"an admin's grant": changed(events.ChangedBucket{Client: "user:bob"}),
		"a raised limit": func(r *remembering, t *testing.T) {
			r.use(t, doc(`  r: {path: /r, upstream: up, degrade: off, capacity: 9, refill_rate: 100}`))
			r.wait(100 * time.Millisecond)
		},
		"a limit taken away": func(r *remembering, t *testing.T) { r.use(t, doc(`  r: {path: /r, upstream: up}`)) },
		"shadow mode":        func(r *remembering, t *testing.T) { r.use(t, doc(tight[:len(tight)-1]+", shadow_mode: true}")) },
		"a cheaper route":    func(r *remembering, t *testing.T) { r.use(t, doc(tight[:len(tight)-1]+", cost: 0}")) },
		"missed echoes": func(r *remembering, t *testing.T) {
			give(r, t)
			r.wait(1100 * time.Millisecond)
			r.Memory.Echo(r.Clock.Elapsed(), true)
		},
		"no echoes for a second": func(r *remembering, t *testing.T) { give(r, t); r.rig.wait(1100 * time.Millisecond) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := spent(t, doc(tight))
			r.red(t, "before", 0)
			do(r, t)
			r.green(t, name)
		})
	}
	t.Run("a rise of M", func(t *testing.T) {
		t.Parallel()
		r := newRemembering(t, doc(`  r: {path: /r, upstream: up, degrade: off, capacity: 10, refill_rate: 100}`))
		r.Multipliers.Set("up", 200_000, 0) // 2 tokens, at 20 a second
		for r.ask("/r", "bob").Action == admission.Forward {
		}
		r.wait(10 * time.Millisecond)
		r.red(t, "before", 0)
		r.Multipliers.Set("up", 1_000_000, 0)
		r.wait(time.Millisecond)
		r.green(t, "after")
	})
}

// A change that overtakes the answer on its way: the answer is not remembered.
func TestGainOvertakesADenial(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(tight))
	r.tokens.Store = &during{Store: r.tokens.Store, do: func() {
		r.Memory.Changed(events.ChangedBucket{Client: "user:bob", Why: events.ChangedGain})
	}}
	for range 3 {
		r.ask("/r", "bob")
	}
	r.red(t, "asks again", 1)
}

// Without NATS a denial holds for a second at the most, and then costs a call again.
func TestDenialsWithoutNATS(t *testing.T) {
	t.Parallel()
	r := spent(t, doc(tight))
	r.rig.wait(1050 * time.Millisecond)
	r.red(t, "deaf", 1)
	for range 9 {
		r.rig.wait(100 * time.Millisecond)
		r.red(t, "deaf, within a second", 0)
	}
	r.rig.wait(101 * time.Millisecond)
	r.red(t, "deaf, after a second", 1)
}

// While the store is away, a route that is open passes whom it had refused, and one that is closed answers 503.
func TestDenialsYieldToTheFallback(t *testing.T) {
	t.Parallel()
	for fallback, want := range map[string]admission.Action{"open": admission.Forward, "closed": admission.StoreAway, "local": admission.Deny} {
		r := spent(t, doc(tight[:len(tight)-1]+", fallback: "+fallback+"}"))
		for range 3 {
			r.Breaker.Ping(false)
		}
		if d := r.ask("/r", "bob"); d.Action != want {
			t.Errorf("%s: %+v", fallback, viewOf(d))
		}
	}
}

// A flood costs one call for each moment at which a token could exist.
func TestFloodIsCheap(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(`  r: {path: /r, upstream: up, degrade: off, capacity: 20, refill_rate: 2}`))
	green, asked := 0, 0
	for range 2000 { // 20 s
		r.wait(10 * time.Millisecond)
		for range 20 {
			asked++
			if r.ask("/r", "bob").Action == admission.Forward {
				green++
			}
		}
	}
	// 40 tokens come in 20 s; the first 20 are there.
	if green < 59 || green > 60 || r.store.calls > 62 {
		t.Errorf("%d of %d requests admitted, %d calls; want 60, and as many calls at the most", green, asked, r.store.calls)
	}
	t.Logf("%d calls for %d requests, %d admitted", r.store.calls, asked, green)
}

// So it does for many clients at once.
func TestFloodOfManyAtOnceIsCheap(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(`  r: {path: /r, upstream: up, degrade: off, capacity: 5, refill_rate: 0.001}`))
	g := &gauge{Store: r.tokens.Store}
	r.Store = g
	var green atomic.Int64
	var wg sync.WaitGroup
	const clients, each, workers = 50, 100, 8
	for range workers {
		wg.Go(func() {
			for n := range clients * each {
				if askFrom(r.Engine, netip.AddrFrom4([4]byte{192, 0, 2, byte(n % clients)})).Action == admission.Forward {
					green.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if calls := g.all.calls.Load(); green.Load() != 5*clients || calls > clients*(5+workers) {
		t.Errorf("%d admitted, %d calls for %d requests", green.Load(), calls, clients*each*workers)
	} else {
		t.Logf("%d calls for %d requests, %d admitted", calls, clients*each*workers, green.Load())
	}
}

func askFrom(e *admission.Engine, peer netip.Addr) admission.Decision {
	return e.Decide(context.Background(), admission.Request{Method: "GET", Path: "/r", Header: http.Header{}, Peer: peer})
}

// What is forgotten when there is no room: first whom there is nothing to remember of, then the denial that
// ends first; never a lease, and a debtor last.
func TestForgetsWhatIsWorthLeast(t *testing.T) {
	t.Parallel()
	r := newRemembering(t, doc(`
  r: {path: /r, upstream: up, degrade: off, capacity: 1, refill_rate: 0.01}
  slow: {path: /slow, upstream: up, degrade: off, capacity: 1, refill_rate: 0.0001}
  hot: {path: /hot, upstream: up, capacity: 1000, refill_rate: 1}`))
	r.Memory = admission.NewMemory(64 * 4) // four a shard
	for range 20 {
		r.wait(5 * time.Millisecond)
		r.ask("/hot", "bob")
	}
	for range 2 {
		r.ask("/slow", "bob")
	}
	if st := r.Memory.Stats(); st.Leased != 1 || st.Keys != 2 {
		t.Fatalf("%+v", st)
	}
	for i := range 20_000 {
		for range 2 {
			askFrom(r.Engine, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}))
		}
	}
	st := r.Memory.Stats()
	if st.Keys > 64*4 || st.Forgotten < 10_000 {
		t.Errorf("%+v", st)
	}
	calls := r.store.calls
	if d := r.ask("/hot", "bob"); !d.Leased() {
		t.Error("a lease was forgotten")
	}
	if d := r.ask("/slow", "bob"); d.Action != admission.Deny || r.store.calls != calls {
		t.Error("a long denial was forgotten for short ones")
	}
}

// stub answers all checks alike, and remembers nobody.
type stub struct {
	store.Store
	red bool
}

func (s stub) Check(_ context.Context, c store.Check) (store.Decision, error) {
	d := store.Decision{Now: startTime, Limits: make([]store.LimitState, len(c.Limits))}
	if s.red {
		d.Tier, d.Until = bucket.Red, 3_600_000_000
		for i := range d.Limits {
			d.Limits[i] = store.LimitState{Tier: bucket.Red, Wait: d.Until, Reset: d.Until, Gen: 1, Seq: 1}
		}
	}
	return d, nil
}

// cardinality has so many distinct clients ask an edge once or twice, all of them refused by three limits, and tells
// the heap that is left, in bytes.
func cardinality(t testing.TB, clients int) uint64 {
	r := newRemembering(t, "anonymous_plan: small\n"+doc(tight))
	r.Store = stub{red: true}
	r.Carried = admission.NewCarried(admission.DefaultCarried)
	r.Local = memstore.New(r.now.Load, memstore.AtMost(100_000)) // as the edge has it
	for i := range clients {
		askFrom(r.Engine, netip.AddrFrom4([4]byte{byte(i >> 24), byte(i >> 16), byte(i >> 8), byte(i)}))
	}
	left := heapBytes()
	// It goes on answering: the last client from memory, a new one by the store.
	if d := askFrom(r.Engine, netip.AddrFrom4([4]byte{byte(clients - 1>>24), byte((clients - 1) >> 16), byte((clients - 1) >> 8), byte(clients - 1)})); d.Action != admission.Deny {
		t.Error("it does not answer any more")
	}
	if st := r.Memory.Stats(); st.Keys > admission.DefaultMemory {
		t.Errorf("%+v", st)
	}
	runtime.KeepAlive(r)
	return left
}

package llm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/ratelimiter"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// bench is a limiter whose clock the test moves.
type bench struct {
	*Limiter
	t   *testing.T
	now atomic.Pointer[time.Time]
}

// newBench counts in memory, or in a Redis of its own.
func newBench(t *testing.T, onRedis bool) *bench {
	t.Helper()
	b := &bench{t: t}
	b.set(time.Now().Truncate(time.Minute).Add(20 * time.Second))
	clock := func() time.Time { return *b.now.Load() }
	shared := NewLocal(clock)
	if onRedis {
		client := redistest.Start(t).Client
		var err error
		shared, err = NewCounters(func(name string, window time.Duration) (ratelimiter.Counter, error) {
			return ratelimiter.NewRedis(name, client, window)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	b.Limiter = &Limiter{
		Shared: shared, Local: NewLocal(clock),
		Breaker: admission.NewBreaker(time.Now, nil), Fleet: admission.NewFleet("this"), Now: clock,
	}
	return b
}

func (b *bench) set(now time.Time)       { b.now.Store(&now) }
func (b *bench) advance(d time.Duration) { b.set(b.now.Load().Add(d)) }
func (b *bench) settle(g Grant, used int64) {
	b.t.Helper()
	if err := g.Settle(b.t.Context(), used); err != nil {
		b.t.Error(err)
	}
}

// reserve fails unless the limit named is what refuses; "": none.
func (b *bench) reserve(q Quota, refused string) Grant {
	b.t.Helper()
	g := b.Reserve(b.t.Context(), q)
	if g.Refused.Name != refused {
		b.t.Errorf("%+v: refused by %q, want %q", q, g.Refused.Name, refused)
	}
	return g
}

// counted is what stands in a counter in the window of the moment d from now.
func (b *bench) counted(c ratelimiter.Counter, key string, d time.Duration) int64 {
	b.t.Helper()
	n, err := c.At(b.now.Load().Add(d)).Get(b.t.Context(), key)
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// TestParallelCallsOverspend is five calls at once on a budget of 100, each of which reserves 50 and uses 150: two are
// admitted, and what they used beyond the budget blocks for the two minutes that it takes to repay it.
func TestParallelCallsOverspend(t *testing.T) {
	t.Parallel()
	for _, onRedis := range []bool{false, true} {
		t.Run(fmt.Sprintf("redis=%v", onRedis), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, onRedis)
			q := Quota{User: "ann", TPM: 100, Tokens: 50}
			grants := make([]Grant, 5)
			var wg sync.WaitGroup
			for i := range grants {
				wg.Go(func() { grants[i] = b.Reserve(context.Background(), q) })
			}
			wg.Wait()
			admitted := slices.DeleteFunc(grants, func(g Grant) bool { return g.Refused.Name != "" })
			if n := b.counted(b.Shared.Users, "ann_TPM_CURRENT", 0); len(admitted) != 2 || n != 100 {
				t.Fatalf("%d admitted, %d counted; want 2, 100", len(admitted), n)
			}
			for _, g := range admitted {
				b.settle(g, 150)
			}
			for minutes, want := range []int64{300, 200, 100, 0} {
				if n := b.counted(b.Shared.Users, "ann_TPM_CURRENT", time.Duration(minutes)*time.Minute); n != want {
					t.Errorf("%d counted in %d minutes, want %d", n, minutes, want)
				}
			}
			for minute := range 3 { // −200, −100, 0
				g := b.reserve(q, TPM)
				if want := 40*time.Second + time.Duration(2-minute)*time.Minute; g.RetryAfter != want || g.Tokens.Remaining != 0 || g.Tokens.Reset != want {
					t.Errorf("in minute %d: retry after %v, %+v; want %v", minute, g.RetryAfter, g.Tokens, want)
				}
				b.advance(time.Minute)
			}
			b.reserve(q, "")
		})
	}
}

// All or nothing: a call that one limit refuses counts in none.
func TestRefusedCallsCountNowhere(t *testing.T) {
	t.Parallel()
	b := newBench(t, false)
	state := func() [3]int64 {
		return [3]int64{
			b.counted(b.Shared.Users, "ann_RPM_CURRENT", 0), b.counted(b.Shared.Users, "ann_TPM_CURRENT", 0),
			b.counted(b.Shared.Models, "m_MODEL_RPS_CURRENT", 0),
		}
	}
	q := Quota{User: "ann", RPM: 3, TPM: 100, Model: "m", RPS: 2, Tokens: 40}
	g := b.reserve(q, "")
	if g.Requests.Name != RPS || g.Requests.Remaining != 1 || g.Tokens.Remaining != 60 || g.Tokens.Reset != 40*time.Second {
		t.Errorf("the tighter limit on calls is told: %+v, %+v", g.Requests, g.Tokens)
	}
	b.reserve(q, "")
	if g := b.reserve(q, TPM); g.RetryAfter != 40*time.Second || g.Tokens.Remaining != 20 {
		t.Errorf("%v, %+v", g.RetryAfter, g.Tokens)
	}
	q.Tokens = 10
	if g := b.reserve(q, RPS); g.RetryAfter > time.Second || g.Requests.Remaining != 0 {
		t.Errorf("%v, %+v", g.RetryAfter, g.Requests)
	}
	if got := state(); got != [3]int64{2, 80, 2} {
		t.Errorf("counted %v, want what two calls count", got)
	}
	q.RPS = 0
	b.reserve(q, "")
	if g := b.reserve(q, RPM); g.RetryAfter != 40*time.Second || g.Requests.Remaining != 0 {
		t.Errorf("%v, %+v", g.RetryAfter, g.Requests)
	}
	if got := state(); got != [3]int64{3, 90, 2} {
		t.Errorf("counted %v", got)
	}
}

// The increment is the only gate: of many at once just the limit pass.
func TestParallelCallsPassOnce(t *testing.T) {
	t.Parallel()
	for _, onRedis := range []bool{false, true} {
		t.Run(fmt.Sprintf("redis=%v", onRedis), func(t *testing.T) {
			t.Parallel()
			testParallelCalls(newBench(t, onRedis), t, onRedis)
		})
	}
}

func testParallelCalls(b *bench, t *testing.T, onRedis bool) {
	q := Quota{User: "ann", RPM: 7, TPM: 1000, Model: "m", RPS: 100, Tokens: 1}
	if onRedis {
		q.RPS = 0 // a second is too short for a clock that stands still
	}
	var passed, refused atomic.Int64
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			g := b.Reserve(context.Background(), q)
			switch {
			case g.Refused.Name == "":
				passed.Add(1)
			case g.Refused.Name == RPM && g.RetryAfter == 40*time.Second:
				refused.Add(1)
			default:
				t.Errorf("%+v", g)
			}
		})
	}
	wg.Wait()
	if passed.Load() != 7 || refused.Load() != 33 {
		t.Errorf("%d passed, %d refused", passed.Load(), refused.Load())
	}
	if n := b.counted(b.Shared.Models, "m_MODEL_RPS_CURRENT", 0); n != 7 && !onRedis {
		t.Errorf("the model counts %d: others must not stand behind those that their own limit refuses", n)
	}
}

func TestSettleAndRefund(t *testing.T) {
	t.Parallel()
	for _, onRedis := range []bool{false, true} {
		t.Run(fmt.Sprintf("redis=%v", onRedis), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, onRedis)
			tokens := func(d time.Duration) int64 { return b.counted(b.Shared.Users, "ann_TPM_CURRENT", d) }
			q := Quota{User: "ann", RPM: 10, TPM: 100, Model: "m", RPS: 10, Tokens: 50}
			want := int64(1)
			if onRedis {
				q.RPS, want = 0, 0 // a second is too short for a clock that stands still
			}
			b.settle(b.reserve(q, ""), 20)
			if n := tokens(0); n != 20 {
				t.Errorf("settled to %d", n)
			}
			g := b.reserve(q, "")
			if err := g.Refund(t.Context()); err != nil {
				t.Error(err)
			}
			rpm, rps := b.counted(b.Shared.Users, "ann_RPM_CURRENT", 0), b.counted(b.Shared.Models, "m_MODEL_RPS_CURRENT", 0)
			if n := tokens(0); n != 20 || rpm != 1 || rps != want {
				t.Errorf("refunded to %d tokens, %d and %d calls", n, rpm, rps)
			}

			// What comes back after the minute lands in the minute charged; what was used beyond, in that of its end.
			less, more := b.reserve(q, ""), b.reserve(Quota{User: "ann", TPM: 100, Tokens: 10}, "")
			b.advance(time.Minute)
			b.reserve(Quota{User: "ann", TPM: 100, Tokens: 7}, "")
			b.settle(less, 10)
			b.settle(more, 15)
			if then, now := tokens(-time.Minute), tokens(0); then != 40 || now != 12 {
				t.Errorf("%d then, %d now; want 40, 12", then, now)
			}
			// A refund after an overdraft takes the debt back that it made room for.
			b.advance(time.Minute)
			over, back := b.reserve(q, ""), b.reserve(q, "")
			b.settle(over, 150)
			if n := tokens(time.Minute); n != 100 {
				t.Errorf("debt of %d, want 100", n)
			}
			b.settle(back, 0)
			if now, next := tokens(0), tokens(time.Minute); now != 150 || next != 50 {
				t.Errorf("%d now, %d in debt; want 150, 50", now, next)
			}
		})
	}
}

// Debt reaches ten minutes ahead at the most; what is beyond is forgiven, and told.
func TestDebtIsBounded(t *testing.T) {
	t.Parallel()
	b := newBench(t, false)
	b.settle(b.reserve(Quota{User: "ann", TPM: 10, Tokens: 10}, ""), maxTokens)
	if n := b.counted(b.Shared.Users, "ann_TPM_CURRENT", 10*time.Minute); n != 0 {
		t.Errorf("%d counted in ten minutes", n)
	}
	if n := b.Forgiven(); n != maxTokens-100 {
		t.Errorf("%d forgiven", n)
	}
	if g := b.reserve(Quota{User: "ann", TPM: 10, Tokens: 10}, TPM); g.RetryAfter != 40*time.Second+9*time.Minute {
		t.Errorf("retry after %v", g.RetryAfter)
	}
	b.advance(10 * time.Minute)
	b.reserve(Quota{User: "ann", TPM: 10, Tokens: 10}, "")
}

// However calls of a user interleave, each minute's counter is what was used in it and what the
// minute before could not hold.
func TestDebtAddsUp(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(1, 2))
	for round := range 300 {
		b := newBench(t, false)
		const quota = 100
		begin := *b.now.Load()
		used := make([]int64, 40) // by minute
		minute := func(at time.Time) int { return int(at.Sub(begin.Truncate(time.Minute)) / time.Minute) }
		var open []Grant
		for range 30 {
			switch rnd.IntN(4) {
			case 0:
				b.advance(time.Duration(rnd.IntN(25)) * time.Second)
			case 1, 2:
				g := b.Reserve(t.Context(), Quota{User: "u", TPM: quota, Tokens: 1 + rnd.Int64N(60)})
				if g.Refused.Name == "" {
					used[minute(g.at)] += g.Reserved()
					open = append(open, g)
				}
			case 3:
				if len(open) == 0 {
					continue
				}
				i := rnd.IntN(len(open))
				g := open[i]
				open = slices.Delete(open, i, i+1)
				real := rnd.Int64N(180)
				at := minute(g.at)
				if real > g.Reserved() {
					at = minute(*b.now.Load())
				}
				if at < minute(*b.now.Load())-1 {
					real = g.Reserved() // what is left over comes too late
				}
				used[at] += real - g.Reserved()
				b.settle(g, real)
			}
		}
		var carry int64
		now := minute(*b.now.Load())
		for m, want := range used {
			want += carry
			carry = max(0, want-quota)
			if m < now-1 {
				continue // expired
			}
			if got := b.counted(b.Shared.Users, "u_TPM_CURRENT", time.Duration(m-now)*time.Minute); got != want {
				t.Fatalf("round %d: minute %d counts %d, want %d", round, m, got, want)
			}
		}
	}
}

// While the shared counters are away each edge admits its share, also of what has no more than one.
func TestCountersAway(t *testing.T) {
	t.Parallel()
	b := newBench(t, false)
	b.Shared = Counters{away{}, away{}}
	b.Fleet.Heard("another", false, time.Now())
	q := Quota{User: "ann", RPM: 4, TPM: 100, Tokens: 80}
	g := b.reserve(q, "")
	if !g.Degraded || g.Requests.Quota != 2 || g.Reserved() != 50 {
		t.Errorf("%+v", g)
	}
	b.settle(g, 10)
	if n := b.counted(b.Local.Users, "ann_TPM_CURRENT", 0); n != 10 {
		t.Errorf("settled to %d", n)
	}
	b.reserve(Quota{User: "ann", RPM: 1, TPM: 1000, Tokens: 1}, RPM)
	b.reserve(Quota{User: "bob", Model: "m", RPS: 1}, "")
	b.reserve(Quota{User: "bob", Model: "m", RPS: 1}, RPS)
	if b.Breaker.State() != admission.Open {
		t.Error("failures do not open the breaker")
	}
	g = b.Reserve(t.Context(), Quota{User: "cid"})
	if g.Refused.Name != "" || g.Reserved() != 0 || g.Settle(t.Context(), 5) != nil {
		t.Errorf("without a limit: %+v", g)
	}
}

type away struct{}

var errAway = errors.New("away")

func (away) Get(context.Context, string) (int64, error)         { return 0, errAway }
func (away) GetLimit(context.Context, string) (int64, error)    { return 0, errAway }
func (away) Incr(context.Context, string, int64) (int64, error) { return 0, errAway }
func (away) IncrAll(context.Context, ...ratelimiter.Count) ([]int64, error) {
	return nil, errAway
}
func (a away) At(time.Time) ratelimiter.Counter { return a }

// A call asks Redis once; once more where its model is limited, and where it is refused.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	b := newBench(t, false)
	calls := 0
	b.Shared = Counters{tally{b.Shared.Users, &calls}, tally{b.Shared.Models, &calls}}
	for _, c := range []struct {
		q       Quota
		refused string
		want    int
	}{
		{Quota{User: "a"}, "", 0},
		{Quota{User: "a", RPM: 2, TPM: 100, Tokens: 50}, "", 1},
		{Quota{User: "a", RPM: 2, TPM: 100, Tokens: 50, Model: "m", RPS: 1}, "", 2},
		{Quota{User: "a", RPM: 2, TPM: 100, Tokens: 50, Model: "m", RPS: 1}, RPM, 2},
		{Quota{User: "b", RPM: 2, TPM: 100, Tokens: 50, Model: "m", RPS: 1}, RPS, 4},
	} {
		calls = 0
		if b.reserve(c.q, c.refused); calls != c.want {
			t.Errorf("%+v: %d calls, want %d", c.q, calls, c.want)
		}
	}
}

// tally counts the round trips of a counter.
type tally struct {
	ratelimiter.Counter
	calls *int
}

func (c tally) At(at time.Time) ratelimiter.Counter { return tally{c.Counter.At(at), c.calls} }
func (c tally) Incr(ctx context.Context, key string, val int64) (int64, error) {
	*c.calls++
	return c.Counter.Incr(ctx, key, val)
}
func (c tally) IncrAll(ctx context.Context, counts ...ratelimiter.Count) ([]int64, error) {
	if len(counts) > 0 {
		*c.calls++
	}
	return c.Counter.IncrAll(ctx, counts...)
}

// Keys are the documented ones, and distinct and bounded whatever a client asks for.
func TestKeys(t *testing.T) {
	t.Parallel()
	b := newBench(t, false)
	client := redistest.Start(t).Client
	counters, err := NewCounters(func(name string, window time.Duration) (ratelimiter.Counter, error) {
		return ratelimiter.NewRedis(name, client, window)
	})
	if err != nil {
		t.Fatal(err)
	}
	b.Shared = counters
	now := time.Now()
	b.set(now)
	b.reserve(Quota{User: "ann", RPM: 1, TPM: 1, Tokens: 1, Model: "llama-3", RPS: 1}, "")
	want := []string{
		fmt.Sprintf("aegis:ann_RPM_CURRENT:%d", now.Unix()/60%64),
		fmt.Sprintf("aegis:ann_TPM_CURRENT:%d", now.Unix()/60%64),
	}
	got := client.Keys(t.Context(), "aegis:*").Val()
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("keys %q, want %q", got, want)
	}
	seen := map[string]string{}
	for _, model := range []string{"", "a", "a:b", "a b", "a%20b", "{a}", "a\n", "A", strings.Repeat("x", 300), strings.Repeat("x", 301), "~a", "meta/llama:8b"} {
		key := modelKey(model)
		if other, twice := seen[key]; twice || len(key) > 100 || strings.ContainsAny(key, ":{} \n") {
			t.Errorf("%q has key %q (also of %q)", model, key, other)
		}
		seen[key] = model
	}
}

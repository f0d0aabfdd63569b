package admission_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// view is what a client learns of a decision.
type view struct {
	Action                           admission.Action
	Tier                             bucket.Tier
	LimitName                        string
	Known                            bool
	Limit, Remaining, Reset, Retry   int64
	Exempt, ShadowExceeded, Degraded bool
}

func viewOf(d admission.Decision) view {
	return view{d.Action, d.Tier, d.LimitName, d.Known, d.Limit, d.Remaining, d.Reset, d.RetryAfter, d.Exempt, d.ShadowExceeded, d.Degraded}
}

func check(t *testing.T, what string, d admission.Decision, want view) {
	t.Helper()
	if diff := cmp.Diff(want, viewOf(d)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestTiers(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`  r: {path: /r, upstream: up, capacity: 5, refill_rate: 2}`))
	for i := range int64(5) {
		check(t, "green", r.ask("/r", "bob"), view{Tier: bucket.Green, LimitName: "r", Known: true, Limit: 5, Remaining: 4 - i, Reset: (i + 2) / 2})
	}
	check(t, "yellow", r.ask("/r", "bob"), view{Action: admission.Degrade, Tier: bucket.Yellow, LimitName: "r", Known: true, Limit: 5, Reset: 3, Retry: 1})
	check(t, "red", r.ask("/r", "bob"), view{Action: admission.Deny, Tier: bucket.Red, LimitName: "r", Known: true, Limit: 5, Reset: 3, Retry: 1})
	r.wait(500 * time.Millisecond)
	check(t, "a token later", r.ask("/r", "bob"), view{Tier: bucket.Green, LimitName: "r", Known: true, Limit: 5, Reset: 3})
	if g, y, red := r.TakeTiers(); g != 6 || y != 1 || red != 1 {
		t.Errorf("tiers %d, %d, %d", g, y, red)
	}
	if g, y, red := r.TakeTiers(); g+y+red != 0 {
		t.Error("tiers were not taken")
	}
}

// A client's route limit, plan and day are asked in one call; the tightest is told.
func TestTightestLimit(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`
  big: {path: /big, upstream: up, capacity: 100, refill_rate: 100}
  small: {path: /small, upstream: up, capacity: 3, refill_rate: 0.1}
  free: {path: /free, upstream: up}`))
	// Plan 10 at 1/s, day 12, from noon: of 99 in 100, 9 in 10 and 11 in 12 the plan's is the tightest. Tight is a
	// matter of shares, not of tokens: 4 of 12 is tighter than 2 of 3.
	check(t, "plan", r.ask("/big", "alice"), view{Tier: bucket.Green, LimitName: bucket.ScopePlan, Known: true, Limit: 10, Remaining: 9, Reset: 1})
	if r.store.calls != 1 || len(r.store.last.Limits) != 3 {
		t.Errorf("%d calls, last with %d limits; want one call with three", r.store.calls, len(r.store.last.Limits))
	}
	check(t, "route", r.ask("/small", "alice"), view{Tier: bucket.Green, LimitName: "small", Known: true, Limit: 3, Remaining: 2, Reset: 10})
	// Minutes later the route and the plan are whole again, the day is not.
	for range 5 {
		r.wait(time.Minute)
		r.ask("/big", "alice")
	}
	r.wait(time.Minute)
	check(t, "day against a small route", r.ask("/small", "alice"), view{Tier: bucket.Green, LimitName: bucket.ScopeDay, Known: true, Limit: 12, Remaining: 4, Reset: 12*3600 - 6*60})
	for range 2 {
		r.wait(time.Minute)
		r.ask("/big", "alice")
	}
	check(t, "day", r.ask("/big", "alice"), view{Tier: bucket.Green, LimitName: bucket.ScopeDay, Known: true, Limit: 12, Remaining: 1, Reset: 12*3600 - 8*60})
	r.ask("/big", "alice")
	check(t, "day used up", r.ask("/big", "alice"), view{Action: admission.Deny, Tier: bucket.Red, LimitName: bucket.ScopeDay, Known: true, Limit: 12, Reset: 12*3600 - 8*60, Retry: 12*3600 - 8*60})
	// Route, plan and day refuse together: the one that refuses longest is told.
	r.wait(12 * time.Hour)
	for range 9 {
		r.ask("/big", "alice")
	}
	r.wait(time.Minute)
	for range 3 {
		r.ask("/small", "alice")
	}
	check(t, "route and day used up", r.ask("/small", "alice"), view{Action: admission.Deny, Tier: bucket.Red, LimitName: bucket.ScopeDay, Known: true, Limit: 12, Reset: 24*3600 - 9*60, Retry: 24*3600 - 9*60})
	check(t, "no limit at all", r.ask("/free", "bob"), view{})
}

// Case 4 and its neighbours: what no wait cures is refused apart, and nothing is asked or consumed.
func TestCostBeyondCapacity(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`
  dear: {path: /dear, upstream: up, capacity: 3, refill_rate: 1, cost: 4}
  shadow: {path: /shadow, upstream: up, capacity: 3, refill_rate: 1, cost: 4, shadow_mode: true}
  plan: {path: /plan, upstream: up, capacity: 100, refill_rate: 1, cost: 11}
  half: {path: /half, upstream: up, capacity: 10, refill_rate: 1, cost: 5}`))
	check(t, "above capacity", r.ask("/dear", "bob"), view{Action: admission.DenyCost, Tier: bucket.Red, LimitName: "dear", Limit: 3})
	check(t, "above the plan", r.ask("/plan", "alice"), view{Action: admission.DenyCost, Tier: bucket.Red, LimitName: bucket.ScopePlan, Limit: 10})
	if r.store.calls != 0 {
		t.Errorf("the store was asked %d times", r.store.calls)
	}
	check(t, "shadow passes it and takes what is there", r.ask("/shadow", "bob"), view{Tier: bucket.Red, LimitName: "shadow", Known: true, Limit: 3, Reset: 3, ShadowExceeded: true})
	calls := r.store.calls

	r.Multipliers.Set("up", 400_000, 0) // C_eff 4; it holds 5 again from 0.5 on, in steps of 0.05
	check(t, "reduced", r.ask("/half", "bob"), view{Action: admission.DenyReduced, Tier: bucket.Red, LimitName: "half", Limit: 4, Retry: 2})
	if r.store.calls != calls {
		t.Error("the store was asked for a cost above the reduced capacity")
	}
	r.Multipliers.Set("up", 500_000, 0)
	check(t, "just enough", r.ask("/half", "bob"), view{Tier: bucket.Green, LimitName: "half", Known: true, Limit: 5, Remaining: 0, Reset: 10})
}

// The multiplier scales a route's limit, and neither plan nor day.
func TestMultiplierScalesRoutesOnly(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`  r: {path: /r, upstream: up, capacity: 20, refill_rate: 10}`))
	r.Multipliers.Set("up", 250_000, 0)
	r.ask("/r", "alice")
	var got []int64
	for _, l := range r.store.last.Limits {
		got = append(got, l.Spec.Capacity/bucket.One, l.Spec.Rate)
	}
	if diff := cmp.Diff([]int64{5, 2_500_000, 10, 1_000_000, 12, 0}, got); diff != "" {
		t.Error(diff)
	}
	r.wait(15*time.Second + time.Microsecond) // without a tick
	r.ask("/r", "alice")
	if c := r.store.last.Limits[0].Spec.Capacity; c != 20*bucket.One {
		t.Errorf("an expired multiplier still holds: capacity %d", c)
	}
}

func TestShadow(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`  r: {path: /r, upstream: up, capacity: 5, refill_rate: 1, shadow_mode: true}`))
	for range 5 {
		r.ask("/r", "bob")
	}
	check(t, "yellow passes", r.ask("/r", "bob"), view{Tier: bucket.Yellow, LimitName: "r", Known: true, Limit: 5, Reset: 5, ShadowExceeded: true})
	d := r.ask("/r", "bob")
	check(t, "red passes", d, view{Tier: bucket.Red, LimitName: "r", Known: true, Limit: 5, Reset: 5, ShadowExceeded: true})
	r.Finish(d, admission.Facts{ID: "x", Outcome: events.OutcomeOK})
	want := []events.Charge{{Scope: "r", Amount: 0, How: events.HowRedis}}
	if diff := cmp.Diff(want, r.records[0].Response.Charges); diff != "" {
		t.Errorf("a shadow pass of an empty bucket (-want +got):\n%s", diff)
	}
}

func TestAdminsAreExempt(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`  r: {path: /r, upstream: up, capacity: 1, refill_rate: 1}`))
	for range 5 {
		check(t, "admin", r.ask("/r", "root"), view{Exempt: true})
	}
	if r.store.calls != 0 {
		t.Error("the store was asked for an admin")
	}
	r.Finish(r.ask("/r", "root"), admission.Facts{ID: "x", Outcome: events.OutcomeOK})
	if e := r.records[0].Response; e.Charges != nil || e.Base != 0 || e.Client != "user:root" || e.Time != startTime {
		t.Errorf("event of an admin: %+v", e)
	}
}

// Refusals that no limit has a part in come before any charge.
func TestRefusedBeforeLimits(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`
  r: {path: /r, upstream: up, capacity: 5, refill_rate: 1, max_body_bytes: 100}
  closed: {path: /closed, upstream: up, deny: true}`))
	if d := r.ask("/closed", "root"); d.Action != admission.Forbid {
		t.Errorf("closed route: %v", d.Action)
	}
	if d := r.ask("/elsewhere", "bob"); d.Action != admission.NoRoute || d.Route != nil {
		t.Errorf("no route: %v", d.Action)
	}
	d := r.Decide(context.Background(), admission.Request{Method: "POST", Path: "/r", Header: headers(), Length: 101, Peer: netip.MustParseAddr("192.0.2.1")})
	if d.Action != admission.TooLarge {
		t.Errorf("declared body too large: %v", d.Action)
	}
	if d := (&admission.Engine{}).Decide(context.Background(), admission.Request{}); d.Action != admission.Unavailable {
		t.Errorf("without a policy: %v", d.Action)
	}
	if r.store.calls != 0 {
		t.Error("the store was asked")
	}
}

// A free route is decided by peeking, and its buckets are named for the settlement.
func TestFreeRoute(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`  r: {path: /r, upstream: up, capacity: 5, refill_rate: 1, cost: 0}`))
	var d admission.Decision
	for range 10 {
		d = r.ask("/r", "bob")
	}
	check(t, "free", d, view{Tier: bucket.Green, LimitName: "r", Known: true, Limit: 5, Remaining: 5})
	r.Finish(d, admission.Facts{ID: "x", Outcome: events.OutcomeOK})
	if diff := cmp.Diff([]events.Charge{{Scope: "r", How: events.HowRedis}}, r.records[0].Response.Charges); diff != "" {
		t.Error(diff)
	}
}

// A call without an answer counts as charged, to every limit, in the window of now. What it
// admits is bounded by the edge's share: a store that answers late must not admit everything.
func TestStoreWithoutAnswer(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`  r: {path: /r, upstream: up, sliding_limit: 5, window_seconds: 60, algorithm: sliding_window}`))
	r.store.fail = fmt.Errorf("test: %w", store.ErrUnknown)
	d := r.ask("/r", "alice")
	check(t, "unknown", d, view{Tier: bucket.Green, LimitName: "r", Known: true, Limit: 5, Remaining: 4, Reset: 61, Degraded: true})
	r.Finish(d, admission.Facts{ID: "x", Outcome: events.OutcomeOK})
	want := []events.Charge{
		{Scope: "r", Spec: 0, Amount: bucket.One, Window: startTime / 60_000_000, How: events.HowUnknown},
		{Scope: bucket.ScopePlan, Spec: 1, Amount: bucket.One, How: events.HowUnknown},
		{Scope: bucket.ScopeDay, Spec: 2, Amount: bucket.One, Window: startTime / 86_400_000_000, How: events.HowUnknown},
	}
	if diff := cmp.Diff(want, r.records[0].Response.Charges); diff != "" {
		t.Errorf("charges (-want +got):\n%s", diff)
	}
	if e := r.records[0].Response; e.Base != bucket.One || e.Time != startTime {
		t.Errorf("base %d, time %d", e.Base, e.Time)
	}
	admitted := 1
	for range 100 {
		r.Breaker.Debit(admission.Passed, true) // so that it never opens
		if r.ask("/r", "alice").Action == admission.Forward {
			admitted++
		}
	}
	if admitted != 5 || r.store.calls != 101 {
		t.Errorf("%d admitted of %d calls without an answer, want 5", admitted, r.store.calls)
	}
}

// Without the store an edge admits its share; the events carry the whole limit, for the settlement.
func TestStoreAway(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]error{
		"unavailable": store.ErrUnavailable,
		"unreadable":  store.ErrState,
		"anything":    errors.New("test"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, doc(`  r: {path: /r, upstream: up, capacity: 20, refill_rate: 4}`))
			for _, peer := range []string{"b", "c", "d"} {
				r.Fleet.Heard(peer, false, time.UnixMicro(startTime))
			}
			r.store.fail = fail
			d := r.ask("/r", "bob")
			check(t, "first", d, view{Tier: bucket.Green, LimitName: "r", Known: true, Limit: 5, Remaining: 4, Reset: 1, Degraded: true})
			r.Finish(d, admission.Facts{ID: "x", Outcome: events.OutcomeOK})
			rec := r.records[0]
			if c := rec.Response.Charges[0]; c.How != events.HowLocal || c.Amount != bucket.One || rec.Specs[0].Capacity != 20*bucket.One {
				t.Errorf("charge %+v of %+v", c, rec.Specs[0])
			}
			for range 4 {
				if d := r.ask("/r", "bob"); d.Action != admission.Forward {
					t.Errorf("within the share: %v", d.Action)
				}
			}
			if d := r.ask("/r", "bob"); d.Action != admission.Degrade {
				t.Errorf("the share's grace: %v", d.Action)
			}
			if d := r.ask("/r", "bob"); d.Action != admission.Deny {
				t.Errorf("beyond the share: %v", d.Action)
			}
		})
	}
}

// The shares of a fleet never sum to more than the limit, but for the one request that each may hold.
func TestSharesSumToTheLimit(t *testing.T) {
	t.Parallel()
	for _, edges := range []int{1, 2, 3, 7, 30} {
		for _, cost := range []int{1, 5} {
			admitted := 0
			for range edges {
				r := newRig(t, doc(fmt.Sprintf(`  r: {path: /r, upstream: up, capacity: 20, refill_rate: 1, cost: %d}`, cost)))
				for i := range edges - 1 {
					r.Fleet.Heard(fmt.Sprint("peer", i), false, time.UnixMicro(startTime))
				}
				r.store.fail = store.ErrUnavailable
				for r.ask("/r", "bob").Action == admission.Forward {
					admitted += cost
				}
			}
			if bound := max(20, edges*cost); admitted > bound || admitted == 0 {
				t.Errorf("%d edges at cost %d admitted %d of 20, bound %d", edges, cost, admitted, bound)
			}
		}
	}
}

// An open breaker keeps requests away from the store, and lets them back after good pings.
func TestOpenBreakerSparesTheStore(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`  r: {path: /r, upstream: up, capacity: 100, refill_rate: 1}`))
	r.store.fail = store.ErrUnknown
	for range 10 {
		if d := r.ask("/r", "bob"); d.Action != admission.Forward || !d.Degraded {
			t.Fatalf("refused for the store's trouble: %+v", viewOf(d))
		}
	}
	if r.store.calls != 3 || !r.Degraded() {
		t.Errorf("%d calls to a dead store; want 3 and then none", r.store.calls)
	}
	for range 3 {
		r.Breaker.Ping(true)
	}
	r.store.fail = nil
	for range 3 {
		if d := r.ask("/r", "bob"); d.Degraded || r.Degraded() {
			t.Errorf("after recovery: %+v, breaker %v", viewOf(d), r.Breaker.State())
		}
	}
	if r.Breaker.State() != admission.Closed {
		t.Errorf("after three answers: %v", r.Breaker.State())
	}
}

// A full store still decides the clients it knows, so new ones it has no room for don't close it to all.
func TestFullStoreIsAsked(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`  r: {path: /r, upstream: up, capacity: 100, refill_rate: 1}`))
	r.store.fail = store.ErrFull
	for range 10 {
		if d := r.ask("/r", "bob"); d.Action != admission.Forward || !d.Degraded {
			t.Fatalf("refused for the store's trouble: %+v", viewOf(d))
		}
	}
	r.store.fail = nil
	if d := r.ask("/r", "alice"); d.Degraded {
		t.Error("a client that the store knows was decided without it")
	}
}

// Clients that leave can't make the store look dead, nor stop a debit half-way.
func TestCancelledClientIsNoStoreFailure(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`  r: {path: /r, upstream: up, capacity: 100, refill_rate: 1}`))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for range 10 {
		d := r.Decide(ctx, admission.Request{Method: "GET", Path: "/r", Header: headers(), Peer: netip.MustParseAddr("192.0.2.1")})
		if d.Degraded {
			t.Fatal("a cancelled client degraded the edge")
		}
	}
}

// Charges and times of events are of the store's clock, whatever the edge's does.
func TestStoreClock(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`  r: {path: /r, upstream: up, capacity: 5, refill_rate: 1}`))
	now := time.UnixMicro(0)
	clock := admission.NewStoreClock(func() time.Time { return now })
	r.Clock = clock
	r.ask("/r", "bob")
	now = now.Add(3 * time.Second)
	if got := clock.Micros(); got != startTime+3_000_000 {
		t.Errorf("store's clock %d, want %d", got, startTime+3_000_000)
	}
}

package admission_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// until asks until something else than a green answer comes, and counts the green ones.
func (r *rig) until(path, key string) (green int) {
	for r.ask(path, key).Action == admission.Forward {
		green++
	}
	return green
}

// trip opens the breaker, and mend brings the store back and closes it.
func (r *rig) trip() {
	r.store.fail = store.ErrUnavailable
	for range 3 {
		r.Breaker.Ping(false)
	}
}

func (r *rig) mend() {
	r.store.fail = nil
	r.wait(2 * time.Second) // the longest of the breaker's pauses
	for range 3 {
		r.Breaker.Ping(true)
	}
	for range 3 {
		r.Breaker.Debit(r.Breaker.Pass(), true)
	}
}

// An edge on its own goes on from the last balance it saw: its share of that, of the debt too, is all it has.
func TestLocalStartsFromTheLastBalance(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{
		"capacity: 40, refill_rate: 0.01", "sliding_limit: 40, window_seconds: 100000, algorithm: sliding_window",
	} {
		r := newRig(t, doc(fmt.Sprintf("  r: {path: /r, upstream: up, degrade: off, %s}", kind)))
		for _, peer := range []string{"b", "c", "d"} {
			r.Fleet.Heard(peer, false, time.UnixMicro(startTime))
		}
		for range 20 { // half of it
			r.ask("/r", "bob")
		}
		r.trip()
		if n := r.until("/r", "bob"); n != 5 {
			t.Errorf("%s: %d admitted; want a fourth of the 20 that were left", kind, n)
		}
		if n := r.until("/r", ""); n != 10 {
			t.Errorf("%s: %d admitted of who was not seen; want a fourth of 40", kind, n)
		}
	}
}

// A debtor stays one: its share of the debt is paid by its share of the refill.
func TestDebtorStaysOneWithoutTheStore(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc("  r: {path: /r, upstream: up, capacity: 10, refill_rate: 2}"))
	r.Fleet.Heard("b", false, time.UnixMicro(startTime))
	d := r.ask("/r", "bob")
	r.Finish(d, admission.Facts{ID: "x", Outcome: events.OutcomeOK})
	shard := store.ShardOf("user:bob")
	if _, err := r.store.Begin(t.Context(), shard, "s", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := r.store.Settle(t.Context(), store.Settlement{Shard: shard, Stream: "s", Seq: 1, Boot: "b", N: 1, Items: []store.Item{
		{Client: "user:bob", Scope: "r", Spec: r.records[0].Specs[0], Delta: 29 * bucket.One, Time: startTime},
	}}); err != nil {
		t.Fatal(err)
	}
	if d := r.ask("/r", "bob"); d.Action != admission.Deny { // 20 in debt
		t.Fatalf("%v", d.Action)
	}
	r.trip()
	r.wait(10*time.Second - time.Millisecond) // 10 of debt, 1 a second
	if d := r.ask("/r", "bob"); d.Action != admission.Deny || !d.Degraded || d.RetryAfter != 2 {
		t.Errorf("in debt: %v, %+v", d.Action, d)
	}
	r.wait(1001 * time.Millisecond)
	if d := r.ask("/r", "bob"); d.Action != admission.Forward {
		t.Errorf("paid off: %v", d.Action)
	}
}

// Who makes the breaker flap wins nothing: each time the edge goes on from what it had itself left, and the store's
// word, which may not know yet what was admitted without it, only ever lowers that.
func TestFlappingBreakerGivesNoFreshQuota(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc("  r: {path: /r, upstream: up, degrade: off, capacity: 40, refill_rate: 0.001}"))
	for _, peer := range []string{"b", "c", "d"} {
		r.Fleet.Heard(peer, false, time.UnixMicro(startTime))
	}
	r.ask("/r", "bob")
	alone := 0
	for range 10 {
		r.trip()
		alone += r.until("/r", "bob")
		r.mend()
		if d := r.ask("/r", "bob"); d.Degraded || d.Action != admission.Forward { // the settler is far behind
			t.Fatalf("with the store: %v", d.Action)
		}
	}
	if alone != 9 {
		t.Errorf("%d admitted without the store in ten outages; want a fourth of the 39 that were left, once", alone)
	}
}

// Routes choose: open lets everything pass and charges what the share still has; closed refuses everything, and not
// as the client's fault.
func TestFallbackOfARoute(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`
  open: {path: /open, upstream: up, capacity: 4, refill_rate: 1, fallback: open}
  closed: {path: /closed, upstream: up, capacity: 4, refill_rate: 1, fallback: closed}
  local: {path: /local, upstream: up, capacity: 4, refill_rate: 1, degrade: off}
`))
	for range 10 { // to the end: denials are not remembered into the outage
		r.ask("/open", "bob")
		r.ask("/closed", "bob")
	}
	r.trip()
	for i := range 20 {
		d := r.ask("/open", "bob")
		r.Finish(d, admission.Facts{ID: "x", Outcome: events.OutcomeOK})
		if d.Action != admission.Forward || !d.Degraded || d.ShadowExceeded || d.Tier != bucket.Green || d.RetryAfter != 0 {
			t.Fatalf("open, request %d: %v, %+v", i+1, d.Action, d)
		}
		if d := r.ask("/closed", "bob"); d.Action != admission.StoreAway || !d.Degraded || d.RetryAfter < 1 {
			t.Fatalf("closed: %v, %+v", d.Action, d)
		}
		if d := r.ask("/open", "alice"); d.Action != admission.Forward {
			t.Fatalf("open, of another: %v", d.Action)
		}
	}
	if n := r.until("/local", "bob"); n != 4 {
		t.Errorf("local: %d admitted", n)
	}
	charged := int64(0)
	for _, rec := range r.records {
		for _, c := range rec.Response.Charges {
			if c.How != events.HowLocal {
				t.Errorf("charged %s", c.How)
			}
			charged += c.Amount
		}
	}
	if charged != 0 { // nothing was left of the limit
		t.Errorf("charged %d", charged)
	}
	if c := r.Counts(); c.Open.Load() < 20 || c.Closed.Load() != 20 {
		t.Errorf("%d passed open, %d refused closed", c.Open.Load(), c.Closed.Load())
	}
	r.mend()
	if d := r.ask("/closed", "bob"); d.Degraded || d.Action != admission.Forward {
		t.Errorf("closed, with the store again: %v", d.Action)
	}
	r.store.fail = fmt.Errorf("test: %w", store.ErrFull)
	if d := r.ask("/closed", "alice"); d.Action != admission.StoreAway {
		t.Errorf("closed, a store without room: %v", d.Action)
	}
}

// The store's clock jumps: back, and nobody gets a token for it; forward, and nobody gets more than is ever there at
// once. The edge's own clock decides nothing while the store answers, and goes on from the store's when it does not.
func TestClockJumps(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc("  r: {path: /r, upstream: up, degrade: off, capacity: 10, refill_rate: 1}"))
	if n := r.until("/r", "bob"); n != 10 {
		t.Fatalf("%d admitted", n)
	}
	r.wait(-time.Hour)
	if n := r.until("/r", "bob"); n != 0 {
		t.Errorf("%d admitted after the clock went back an hour", n)
	}
	r.wait(30 * time.Minute)
	if n := r.until("/r", "bob"); n != 0 {
		t.Errorf("%d admitted in the time that had been already", n)
	}
	r.wait(24 * time.Hour)
	if n := r.until("/r", "bob"); n != 10 {
		t.Errorf("%d admitted after the clock went a day ahead, want a full bucket", n)
	}
	r.trip()
	if n := r.until("/r", "bob"); n != 0 {
		t.Errorf("%d admitted by the edge alone", n)
	}
	r.wait(3 * time.Second)
	if n := r.until("/r", "bob"); n != 3 {
		t.Errorf("%d admitted by the edge alone in three seconds", n)
	}
	r.wait(-time.Hour)
	if n := r.until("/r", "bob"); n != 0 {
		t.Errorf("%d admitted by the edge alone after its clock went back", n)
	}
}

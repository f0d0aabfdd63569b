package admission_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// The route chooses which requests without an answer are paid back.
func TestRefunds(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`
  usual: {path: /usual, upstream: up, capacity: 5, refill_rate: 1}
  all: {path: /all, upstream: up, capacity: 5, refill_rate: 1, refund: [unreached, reset, timeout]}
  none: {path: /none, upstream: up, capacity: 5, refill_rate: 1, refund: []}`))
	for _, c := range []struct {
		path       string
		outcome    events.Outcome
		unanswered bool
		want       bool
	}{
		{"/usual", events.OutcomeUnreached, true, true},
		{"/usual", events.OutcomeReset, true, false},
		{"/usual", events.OutcomeTimeout, true, false},
		{"/usual", events.OutcomeAborted, true, false},
		{"/all", events.OutcomeUnreached, true, true},
		{"/all", events.OutcomeReset, true, true},
		{"/all", events.OutcomeReset, false, false}, // in the middle of the answer
		{"/all", events.OutcomeTimeout, true, true},
		{"/all", events.OutcomeAborted, true, false},
		{"/none", events.OutcomeUnreached, true, false},
	} {
		r.records = nil
		r.Finish(r.ask(c.path, "alice"), admission.Facts{ID: "id", Outcome: c.outcome, Unanswered: c.unanswered})
		if got := r.records[0].Response.Refund; got != c.want {
			t.Errorf("%s, %s, unanswered %v: refund %v, want %v", c.path, c.outcome, c.unanswered, got, c.want)
		}
	}
}

// A batch names each spec once, and encodes the same when it is encoded again.
func TestEncodeBatch(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`
  a: {path: /a, upstream: up, capacity: 5, refill_rate: 1, max_cost: 9, cost_per_second: 2}
  b: {path: /b, upstream: up, capacity: 5, refill_rate: 1}
  c: {path: /c, upstream: up, capacity: 6, refill_rate: 1}`))
	for _, path := range []string{"/a", "/b", "/c", "/a"} {
		r.Finish(r.ask(path, "alice"), admission.Facts{
			ID: "id", ComputeCost: "7", Status: 200, Latency: time.Millisecond, Duration: 2 * time.Millisecond, Outcome: events.OutcomeOK,
		})
	}
	first, err := admission.EncodeBatch("edge", "boot", 9, r.records)
	if err != nil {
		t.Fatal(err)
	}
	again, err := admission.EncodeBatch("edge", "boot", 9, r.records)
	if err != nil || string(first) != string(again) {
		t.Errorf("encoded again: %v\n%s\n%s", err, first, again)
	}
	batch, err := events.Decode[events.ResponseBatch](first)
	if err != nil {
		t.Fatal(err)
	}
	route := bucket.Effective(bucket.Limit{Kind: bucket.TokenBucket, Capacity: 5, Rate: bucket.One, Grace: true}, bucket.One)
	plan := bucket.Effective(bucket.Limit{Kind: bucket.TokenBucket, Capacity: 10, Rate: bucket.One}, bucket.One)
	day := bucket.Effective(bucket.Limit{Kind: bucket.DailyQuota, Capacity: 12}, bucket.One)
	other := bucket.Effective(bucket.Limit{Kind: bucket.TokenBucket, Capacity: 6, Rate: bucket.One, Grace: true}, bucket.One)
	if diff := cmp.Diff([]bucket.Spec{route, plan, day, other}, batch.Specs); diff != "" {
		t.Errorf("specs (-want +got):\n%s", diff)
	}
	charges := func(scope string, spec int) []events.Charge {
		return []events.Charge{
			{Scope: scope, Spec: spec, Amount: bucket.One, How: events.HowRedis},
			{Scope: bucket.ScopePlan, Spec: 1, Amount: bucket.One, How: events.HowRedis},
			{Scope: bucket.ScopeDay, Spec: 2, Amount: bucket.One, Window: startTime / 86_400_000_000, How: events.HowRedis},
		}
	}
	want := events.Response{
		ID: "id", Time: startTime, Client: "user:alice", Route: "a", Upstream: "up", Config: 3, Base: bucket.One, Charges: charges("a", 0),
		ComputeCost: "7", LatencyRate: 2 * bucket.One, MaxCost: 9 * bucket.One, Status: 200, Latency: 1000, Duration: 2000, Outcome: events.OutcomeOK,
	}
	if batch.Boot != "boot" || batch.Edge != "edge" || batch.N != 9 || len(batch.Events) != 4 {
		t.Errorf("batch %+v", batch)
	}
	if diff := cmp.Diff(want, batch.Events[0]); diff != "" {
		t.Errorf("event (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(charges("b", 0), batch.Events[1].Charges); diff != "" {
		t.Errorf("charges of an equal route (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(charges("c", 3), batch.Events[2].Charges); diff != "" {
		t.Errorf("charges of another route (-want +got):\n%s", diff)
	}
}

// An upstream that is not trusted with costs sets none.
func TestUntrustedComputeCost(t *testing.T) {
	t.Parallel()
	r := newRig(t, `
upstreams: {up: {url: "http://127.0.0.1:1", trust_compute_cost: false}}
routes: {r: {path: /r, upstream: up, capacity: 5, refill_rate: 1}}`)
	r.Finish(r.ask("/r", ""), admission.Facts{ID: "id", ComputeCost: "7", Outcome: events.OutcomeOK})
	if c := r.records[0].Response.ComputeCost; c != "" {
		t.Errorf("cost %q of an untrusted upstream", c)
	}
}

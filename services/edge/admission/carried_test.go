package admission_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

func newSighted(t *testing.T, most int) *rig {
	t.Helper()
	r := newRig(t, doc(`
  r: {path: /r, upstream: up, capacity: 10, refill_rate: 1, degrade: off}`))
	r.Carried = admission.NewCarried(most)
	return r
}

// lose empties the shared store.
func (r *rig) lose() { r.store.Store = memstore.New(r.now.Load) }

// The store loses everything, time and again: its clients go on from what this edge has seen, refilled.
func TestEdgeHealsLostState(t *testing.T) {
	t.Parallel()
	r := newSighted(t, 100)
	for i := range int64(10) {
		d := r.ask("/r", "ann")
		if d.Action != admission.Forward || d.Remaining != 9-i {
			t.Fatalf("request %d: %v, %d left", i, d.Action, d.Remaining)
		}
		r.lose()
	}
	if d := r.ask("/r", "ann"); d.Action != admission.Deny {
		t.Errorf("%v, %d left of an empty bucket that was lost", d.Action, d.Remaining)
	}
	r.lose()
	r.wait(3 * time.Second)
	if d := r.ask("/r", "ann"); d.Action != admission.Forward || d.Remaining != 2 {
		t.Errorf("%v, %d left; want what 3 s have refilled, less this one", d.Action, d.Remaining)
	}
	if healed := r.Counts().Healed.Load(); healed == 0 {
		t.Error("nothing is counted as healed")
	}
}

// What an administrator changed is not healed away, though the bucket be lost afterwards.
func TestEdgeForgetsWhatWasReset(t *testing.T) {
	t.Parallel()
	for _, scope := range []string{"", "r"} {
		r := newSighted(t, 100)
		var client string
		for range 10 {
			client = r.ask("/r", "ann").Client.ID
		}
		r.Changed(events.ChangedBucket{Client: client, Scope: "r", Why: events.ChangedDebt}) // as true as it was
		r.lose()
		if d := r.ask("/r", "ann"); d.Action != admission.Deny {
			t.Errorf("a debt that was told of is forgotten: %v", d.Action)
		}
		r.Changed(events.ChangedBucket{Client: client, Scope: scope})
		r.lose()
		if d := r.ask("/r", "ann"); d.Action != admission.Forward || d.Remaining != 9 {
			t.Errorf("scope %q: %v, %d left after a reset and a loss", scope, d.Action, d.Remaining)
		}
	}
}

// However many clients come, so many are remembered.
func TestCarriedIsBounded(t *testing.T) {
	t.Parallel()
	const most = 128
	s := admission.NewCarried(most)
	spec := bucket.Spec{Kind: bucket.TokenBucket, Capacity: bucket.One, Rate: 1, SlowestRate: 1}
	for i := range 10 * most {
		c := store.Check{Client: fmt.Sprint(i), Limits: []store.Limit{{Scope: "r", Spec: spec}}}
		s.Learn(c, store.Decision{Now: 1, Limits: []store.LimitState{{Gen: 1, Seq: 1}}})
		if s.Recall(c) == nil {
			t.Fatalf("client %d is forgotten at once", i)
		}
	}
	if n := s.Len(); n > most {
		t.Errorf("%d remembered, want %d at the most", n, most)
	}
}

// Answers that overtake each other leave the newest remembered.
func TestCarriedKeepsTheNewest(t *testing.T) {
	t.Parallel()
	s := admission.NewCarried(100)
	spec := bucket.Spec{Kind: bucket.TokenBucket, Capacity: bucket.One, Rate: 1, SlowestRate: 1}
	c := store.Check{Client: "ann", Limits: []store.Limit{{Scope: "r", Spec: spec}}}
	learn := func(now, gen, seq int64) {
		s.Learn(c, store.Decision{Now: now, Limits: []store.LimitState{{Gen: gen, Seq: seq}}})
	}
	for _, step := range []struct{ now, gen, seq, wantSeq int64 }{
		{10, 1, 5, 5},
		{10, 1, 4, 5}, // in one call with the one before
		{9, 1, 3, 5},
		{11, 2, 1, 1}, // made anew
		{10, 1, 6, 1},
	} {
		learn(step.now, step.gen, step.seq)
		if got := s.Recall(c)[0].Seq; got != step.wantSeq {
			t.Errorf("after %+v: seq %d", step, got)
		}
	}
	learn(12, 0, 0)
	if s.Recall(c) != nil {
		t.Error("a bucket that is full, and not stored, is remembered")
	}
}

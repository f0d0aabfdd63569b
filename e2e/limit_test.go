package e2e

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/internal/history"
)

// One client, three edges, far more requests than its limit: the fleet admits what one bucket would.
func TestSharedLimitHoldsOverAllEdges(t *testing.T) {
	change(t, map[string]quota{"fast": sample})
	list := service(t, "edge", edges)
	green := func(i int) float64 {
		n, err := served(t.Context(), list[i], "fast")
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := make([]float64, edges)
	for i := range before {
		before[i] = green(i)
	}

	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
	defer cancel()
	answers := load(ctx, 5*time.Millisecond, 24, func(ctx context.Context, _ int) answer {
		return send(ctx, http.MethodGet, running.Front+"/api/fast", "demo-enterprise")
	})

	var admitted, passed []history.Request // green; green and yellow
	first, last := answers[0].start, answers[0].end
	counts, degraded := map[int]int{}, 0
	for _, a := range answers {
		first, last = min(first, a.start), max(last, a.end)
		counts[a.status]++
		if a.header.Get(headerDegraded) != "" {
			degraded++
		}
		r := history.Request{Start: a.start, End: a.end, Cost: 1}
		switch {
		case a.err != nil:
			t.Fatal(a)
		case a.status == http.StatusOK:
			admitted, passed = append(admitted, r), append(passed, r)
		case a.status == http.StatusAccepted:
			passed = append(passed, r)
		case a.status != http.StatusTooManyRequests:
			t.Fatal(a)
		}
	}
	t.Logf("%d requests in %v: %v, %d degraded", len(answers), last-first, counts, degraded)
	if degraded > 0 {
		t.Errorf("%d requests were decided without Redis: this shows nothing about sharing", degraded)
	}

	// Yellow answers spend the grace, a fifth of the quota, and then what green would have.
	withGrace := history.Limit{Capacity: sample.Capacity + sample.Capacity/5, Rate: sample.RefillRate * 1.2}
	if err := history.Check(admitted, history.Limit{Capacity: sample.Capacity, Rate: sample.RefillRate}); err != nil {
		t.Errorf("green: %v", err)
	}
	if err := history.Check(passed, withGrace); err != nil {
		t.Errorf("green and yellow: %v", err)
	}
	// It must have been put to the test, and have given what it owed.
	owed := float64(withGrace.Capacity) + withGrace.Rate*(last-first).Seconds()
	if float64(len(answers)) < 3*owed {
		t.Errorf("%d requests do not press a limit that allows %.0f", len(answers), owed)
	}
	if float64(len(passed)) < 0.9*owed {
		t.Errorf("%d passed, want nearly the %.0f that the limit allows", len(passed), owed)
	}
	for i, edge := range list {
		if n := green(i) - before[i]; n < 1 {
			t.Errorf("edge %s admitted nothing: the limit was not shared", edge.Hostname)
		} else {
			t.Logf("edge %s admitted %v", edge.Hostname, n)
		}
	}
}

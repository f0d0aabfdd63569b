package e2e

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/e2e/history"
)

// One client, three edges, far more requests than its limit: the fleet admits what one bucket would.
func TestSharedLimitHoldsOverAllEdges(t *testing.T) {
	change(t, map[string]quota{"fast": sample})
	list := service(t, "edge", edges)
	green := func(i int) float64 {
		n, err := metric(t.Context(), list[i], `aegis_edge_requests_total{route="fast",tier="green"}`)
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

	var admitted []history.Request
	first, last := answers[0].start, answers[0].end
	counts := map[int]int{}
	for _, a := range answers {
		first, last = min(first, a.start), max(last, a.end)
		counts[a.status]++
		switch {
		case a.err != nil:
			t.Fatal(a)
		case a.status == http.StatusOK:
			admitted = append(admitted, history.Request{Start: a.start, End: a.end, Cost: 1})
		case a.status != http.StatusTooManyRequests && a.status != http.StatusAccepted:
			t.Fatal(a)
		}
	}
	seconds := (last - first).Seconds()
	t.Logf("%d requests in %.2f s: %v", len(answers), seconds, counts)

	if err := history.Check(admitted, history.Limit{Capacity: sample.Capacity, Rate: sample.RefillRate}); err != nil {
		t.Error(err)
	}
	// It must have been put to the test, and have given what it owed.
	owed := float64(sample.Capacity) + sample.RefillRate*seconds
	if float64(len(answers)) < 3*owed {
		t.Errorf("%d requests do not press a limit that allows %.0f", len(answers), owed)
	}
	if float64(len(admitted)) < 0.9*owed {
		t.Errorf("%d admitted, want nearly the %.0f that the limit allows", len(admitted), owed)
	}
	for i, edge := range list {
		if n := green(i) - before[i]; n < 1 {
			t.Errorf("edge %s admitted nothing: the limit was not shared", edge.Hostname)
		} else {
			t.Logf("edge %s admitted %v", edge.Hostname, n)
		}
	}
}

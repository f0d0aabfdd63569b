package e2e

import (
	"context"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/e2e/stack"
)

// A slow upstream, then a failing one, takes the multiplier of its routes to 0.2 on every
// edge, a later one included, and a good one brings it back to 1.
func TestUpstreamHealthMovesEveryEdge(t *testing.T) {
	change(t, map[string]quota{"fast": {Capacity: 20, RefillRate: 10}})
	list := service(t, "edge", edges)
	const key = "demo-starter"

	// The admin's requests are free, so that no limit decides what is measured.
	traffic := func(path string) func() []answer {
		return background(t, 20*time.Millisecond, 32, func(ctx context.Context, _ int) answer {
			return send(ctx, http.MethodGet, running.Front+path, "demo-admin")
		})
	}
	multiplier := func(value string) func(context.Context, stack.Container) error {
		return shows("/api/fast", key, headerMultiplier, value)
	}
	restore := func() {
		t.Helper()
		stop := traffic("/api/fast")
		defer stop()
		everyEdge(t, list, 60*time.Second, "back to 1.0", multiplier("1.0"))
	}

	restore()
	for _, bad := range []struct {
		path   string
		status int
		joins  bool // an edge starts while M is low
	}{
		{"/api/slow?ms=900", http.StatusOK, false},
		{"/api/fail?status=503", http.StatusServiceUnavailable, true},
	} {
		stop := traffic(bad.path)
		defer stop()
		everyEdge(t, list, 30*time.Second, bad.path+" takes M to 0.2", multiplier("0.2"))
		for _, a := range stop() {
			if a.err != nil || a.status != bad.status {
				t.Fatalf("the admin's requests pass, whatever M: %v", a)
			}
		}
		everyEdge(t, list, 5*time.Second, "a fifth of the capacity", shows("/api/fast", key, headerLimit, strconv.Itoa(20/5)))

		if bad.joins {
			if err := running.Scale(t.Context(), edges+1); err != nil {
				t.Fatal(err)
			}
			everyEdge(t, service(t, "edge", edges+1), 2*time.Second, "a new edge applies M", multiplier("0.2"))
			if err := running.Scale(t.Context(), edges); err != nil {
				t.Fatal(err)
			}
			list = service(t, "edge", edges)
		}
		restore()
	}
}

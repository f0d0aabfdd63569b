package e2e

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/e2e/stack"
)

// A cost of 10 takes 10, however it is split between admission and settlement; a cost
// above the balance makes a debt, and the debt blocks on every edge until it is refilled.
func TestCostSettlesAndDebtBlocks(t *testing.T) {
	const key = "demo-growth"
	slow := quota{Capacity: 20, RefillRate: 0.01} // a token in 100 s: what is measured is settlement
	change(t, map[string]quota{"cost": slow})
	list := service(t, "edge", edges)

	a := get(t, at(list[0], stack.EdgePort, "/api/cost?units=10"), key)
	if a.status != http.StatusOK || a.number(t, headerRemaining) != 19 {
		t.Fatalf("the base cost of 1 leaves 19: %v, %v", a, a.header)
	}
	if a.header.Get("X-Compute-Cost") != "" {
		t.Error("X-Compute-Cost reached the client")
	}
	awaitTokens(t, "cost", key, 10, 10.5)

	a = get(t, at(list[1], stack.EdgePort, "/api/cost?units=45"), key)
	if a.status != http.StatusOK || a.number(t, headerRemaining) != 9 {
		t.Fatalf("after a cost of 10, the next request leaves 9: %v, %v", a, a.header)
	}
	awaitTokens(t, "cost", key, -35, -34.5)

	for _, edge := range list {
		a := get(t, at(edge, stack.EdgePort, "/api/cost?units=1"), key)
		if a.status != http.StatusTooManyRequests || a.header.Get(headerTier) != "red" {
			t.Errorf("in debt, edge %s: %v, %v", edge.Hostname, a, a.header)
			continue
		}
		if wait := a.number(t, headerRetryAfter); wait < 3400 || wait > 3600 {
			t.Errorf("Retry-After is %d s, want the time to refill 36 tokens at 0.01/s", wait)
		}
		if a.number(t, headerRemaining) != 0 || !strings.Contains(a.header.Get("Content-Type"), "application/problem+json") {
			t.Errorf("refused with %v: %v", a.header, a)
		}
	}

	// 36 tokens at 9 a second take 4 s from when the debt was written, which was after the request began.
	const owed = 4 * time.Second
	change(t, map[string]quota{"cost": {Capacity: 20, RefillRate: 9}})
	changed := time.Since(epoch)
	var green answer
	err := stack.Await(t.Context(), 10*time.Second, func(ctx context.Context) error {
		green = send(ctx, http.MethodGet, running.Front+"/api/cost?units=1", key)
		if green.err == nil && green.status != http.StatusOK {
			return errors.New(green.String())
		}
		return green.err
	})
	if err != nil {
		t.Fatalf("the debt was not refilled: %v", err)
	}
	if green.end < a.start+owed || green.start > changed+owed+time.Second {
		t.Errorf("green after %v, want %v from the request that made the debt", green.end-a.start, owed)
	}
}

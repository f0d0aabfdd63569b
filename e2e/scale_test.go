package e2e

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/e2e/stack"
)

// Edges come and go under load, and no request notices.
func TestScalingLosesNothing(t *testing.T) {
	change(t, map[string]quota{"fast": plenty})
	stop := background(t, 8*time.Millisecond, 8, mixed)
	defer stop()
	defer func() {
		if err := running.Scale(t.Context(), edges); err != nil {
			t.Error(err)
		}
	}()
	for _, n := range []int{5, 2} {
		if err := running.Scale(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		list := service(t, "edge", n)
		before := map[string]float64{}
		for _, edge := range list {
			served, err := metric(t.Context(), edge, `aegis_edge_requests_total{route="fast",tier="green"}`)
			if err != nil {
				t.Fatal(err)
			}
			before[edge.ID] = served
		}
		everyEdge(t, list, 15*time.Second, "take part", func(ctx context.Context, edge stack.Container) error {
			served, err := metric(ctx, edge, `aegis_edge_requests_total{route="fast",tier="green"}`)
			if err == nil && served <= before[edge.ID] {
				err = errors.New("no request came")
			}
			return err
		})
	}
	answers := stop()
	for _, a := range answers {
		if a.err != nil || a.status != http.StatusOK {
			t.Errorf("%v", a)
		}
	}
	t.Logf("%d requests", len(answers))
}

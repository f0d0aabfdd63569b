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
			n, err := served(t.Context(), edge, "fast")
			if err != nil {
				t.Fatal(err)
			}
			before[edge.ID] = n
		}
		everyEdge(t, list, 15*time.Second, "take part", func(ctx context.Context, edge stack.Container) error {
			n, err := served(ctx, edge, "fast")
			if err == nil && n <= before[edge.ID] {
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

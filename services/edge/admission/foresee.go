package admission

import (
	"context"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// Prospect is what would become of a request.
type Prospect struct {
	// Decision is made but for the limits' states: Forward means that it may be admitted after Wait.
	Decision
	// Wait is how long until every limit may have room for its cost without grace; 0: now.
	Wait time.Duration
	// Each is how long the limits take to make room for one such request.
	Each time.Duration
}

// Foresee tells what would become of a request, and charges nothing. It asks the shared store only; the error
// says that there was no answer.
func (e *Engine) Foresee(ctx context.Context, r Request) (Prospect, error) {
	d, scoped, limited := e.consider(r)
	p := Prospect{Decision: d}
	if !limited || len(scoped) == 0 || d.Route.Shadow {
		return p, nil
	}
	check := p.check(scoped)
	if p.refuseCost(scoped, check.Limits) {
		p.Wait = time.Duration(p.RetryAfter) * time.Second
		return p, nil
	}
	if e.Breaker.State() != Closed {
		return p, store.ErrUnavailable
	}
	cost := check.Cost
	check.Cost = 0 // a peek
	answer, err := e.Store.Check(ctx, check)
	if err != nil {
		return p, err
	}
	for i, l := range check.Limits {
		wait, each := room(l.Spec, answer.Limits[i], cost)
		p.Wait, p.Each = max(p.Wait, wait), max(p.Each, each)
	}
	return p, nil
}

// room is how long a limit takes until it holds cost, and how long to make up for it. In a window that depends on
// how it was filled; a tenth of the window is soon enough to look again.
func room(s bucket.Spec, at store.LimitState, cost int64) (wait, each time.Duration) {
	missing := cost - at.Remaining
	switch s.Kind {
	case bucket.TokenBucket:
		perToken := float64(time.Second) / float64(s.Rate) // of a micro-token
		return time.Duration(perToken * float64(max(0, missing))), time.Duration(perToken * float64(cost))
	case bucket.SlidingWindow:
		window := time.Duration(s.Window) * time.Second
		if missing > 0 {
			wait = min(window/10, time.Duration(at.Reset)*time.Microsecond)
		}
		return wait, time.Duration(float64(window) * float64(cost) / float64(s.Capacity))
	default:
		if missing > 0 {
			wait = time.Duration(at.Reset) * time.Microsecond
		}
		return wait, 0
	}
}

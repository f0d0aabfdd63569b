// Package history judges a limiter from outside, by what its clients saw.
//
// A client knows when it sent a request and when the answer came; the limiter
// decided at some moment between the two. Requests that lie wholly within an
// interval were therefore decided within it, wherever in the fleet that was. So
// whatever the clocks and the number of replicas, a token bucket of capacity C
// that refills by R a second has admitted at most C + R·t in every interval of
// length t, besides what was leased when it began, and Check looks at every interval that can matter.
package history

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Request is one admitted request as its client saw it.
type Request struct {
	// Start is when it was sent, End when the answer came, both on the client's monotonic clock.
	Start, End time.Duration
	// Cost is what it was charged, in tokens.
	Cost int64
}

// Limit is what a token bucket allows.
type Limit struct {
	Capacity int64   // tokens
	Rate     float64 // tokens a second
	// Leased, if not nil, is how many tokens had been charged to the bucket at that moment, and were
	// spent only later: an interval that begins then may see them besides.
	Leased func(at time.Duration) int64
}

// atOnce is the most that the bucket admits at a moment: what an interval that begins then has besides its refill.
func (l Limit) atOnce(at time.Duration) float64 {
	if l.Leased == nil {
		return float64(l.Capacity)
	}
	return float64(l.Capacity + l.Leased(at))
}

// Violation is an interval in which more was admitted than the limit allows.
type Violation struct {
	From, To time.Duration
	Admitted int64
	Allowed  float64
}

// Error says by how much the limit was broken, and when.
func (v *Violation) Error() string {
	return fmt.Sprintf("%d tokens admitted between %v and %v, %.2f allowed", v.Admitted, v.From, v.To, v.Allowed)
}

// rounding covers the arithmetic of floating point, far below a token.
const rounding = 1e-6

// Check finds the interval that breaks the limit by most, as a *Violation, or
// nil when none does. The order of the requests does not matter.
func Check(admitted []Request, limit Limit) error {
	for i, r := range admitted {
		if r.End < r.Start || r.Cost < 0 {
			return fmt.Errorf("request %d: ends before it starts or has a negative cost: %+v", i, r)
		}
	}
	// An interval that breaks the limit still does when it is narrowed to begin with the
	// first start and end with the last end of what lies within it.
	byEnd := slices.SortedFunc(slices.Values(admitted), func(a, b Request) int { return cmp.Compare(a.End, b.End) })
	var worst *Violation
	excess := rounding
	for _, first := range byEnd {
		begun := limit.atOnce(first.Start)
		var sum int64
		for _, last := range byEnd {
			if last.Start < first.Start {
				continue
			}
			sum += last.Cost
			allowed := begun + limit.Rate*(last.End-first.Start).Seconds()
			if over := float64(sum) - allowed; over > excess {
				excess = over
				worst = &Violation{From: first.Start, To: last.End, Admitted: sum, Allowed: allowed}
			}
		}
	}
	if worst == nil {
		return nil
	}
	return worst
}

package bus

import (
	"context"
	"math/rand/v2"
	"time"
)

// backoff is a pause that doubles from first to most.
type backoff struct{ first, most, next time.Duration }

func newBackoff(first, most time.Duration) *backoff {
	return &backoff{first: first, most: most, next: first}
}

func (p *backoff) reset() { p.next = p.first }

// sleep waits for the pause (between half and all of it), or until wake is
// closed; its error is that of ctx.
func (p *backoff) sleep(ctx context.Context, wake <-chan struct{}) error {
	pause := p.next/2 + rand.N(p.next/2)
	p.next = min(2*p.next, p.most)
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-wake:
		return nil
	case <-t.C:
		return nil
	}
}

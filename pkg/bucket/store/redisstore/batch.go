package redisstore

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

const (
	// inFlight bounds the pipelines under way to one node: while one is being answered, the next goes out.
	inFlight = 2
	// maxBatch bounds the limits that one pipeline decides, and so how long Redis is busy with it.
	maxBatch = 64
)

// batcher gathers concurrent checks that go to one node. One that finds a pipeline
// free goes at once, alone; one that does not waits for its turn, and the first to wait leads
// all that wait with it. So nothing is delayed for the sake of a batch, and no goroutine is owned.
type batcher struct {
	// send decides the checks, once each, and sets their outcome.
	send func([]*ask)
	// patience is how long a check may wait for its turn.
	patience time.Duration

	mu      sync.Mutex
	running int
	waiting []*ask
}

// ask is a check and its outcome.
type ask struct {
	check    store.Check
	decision store.Decision
	err      error

	since time.Time
	// turn tells a waiting ask to lead (true), or that it is done (false).
	turn chan bool
}

// do runs c and returns its error. ctx bounds the wait for a turn; what has been sent is waited
// for, as long as its connection's timeout lets it.
func (b *batcher) do(ctx context.Context, c *ask) error {
	b.mu.Lock()
	if b.running < inFlight {
		b.running++
		b.mu.Unlock()
		b.lead(c)
		return c.err
	}
	c.since, c.turn = time.Now(), make(chan bool, 1)
	b.waiting = append(b.waiting, c)
	b.mu.Unlock()

	lead := false
	select {
	case lead = <-c.turn:
	case <-ctx.Done():
		if b.leave(c) {
			return fmt.Errorf("%w: %w", store.ErrUnavailable, ctx.Err())
		}
		lead = <-c.turn
	}
	if lead {
		b.lead(c)
	}
	return c.err
}

// leave takes c out of those that wait, unless it has been called up.
func (b *batcher) leave(c *ask) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.Index(b.waiting, c)
	if i >= 0 {
		b.waiting = slices.Delete(b.waiting, i, i+1)
	}
	return i >= 0
}

// lead sends c with those that wait, and passes the pipeline on. Who has waited too long, as
// behind a server that stalls, is not sent any more.
func (b *batcher) lead(c *ask) {
	b.mu.Lock()
	n, limits := 0, len(c.check.Limits)
	for n < len(b.waiting) && limits+len(b.waiting[n].check.Limits) <= maxBatch {
		limits += len(b.waiting[n].check.Limits)
		n++
	}
	batch := append([]*ask{c}, b.waiting[:n]...)
	b.waiting = slices.Delete(b.waiting, 0, n)
	b.mu.Unlock()

	var late []*ask
	batch = slices.DeleteFunc(batch, func(w *ask) bool {
		if w.turn == nil || time.Since(w.since) <= b.patience {
			return false
		}
		w.err = fmt.Errorf("%w: no connection was free for %v", store.ErrUnavailable, b.patience)
		late = append(late, w)
		return true
	})
	if len(batch) > 0 {
		b.send(batch)
	}

	b.mu.Lock()
	if len(b.waiting) > 0 {
		b.waiting[0].turn <- true
		b.waiting = slices.Delete(b.waiting, 0, 1)
	} else {
		b.running--
	}
	b.mu.Unlock()
	for _, w := range append(batch, late...) {
		if w != c {
			w.turn <- false
		}
	}
}

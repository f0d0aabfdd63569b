package admission

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

const (
	pingInterval = 100 * time.Millisecond
	// pingTimeout is the slowest good sample.
	pingTimeout = 200 * time.Millisecond
	// trip is how many bad samples in a row open the breaker, and how many good ones end that.
	trip = 3
)

// BreakerState says whether requests ask the shared store.
type BreakerState int32

const (
	// Closed: requests ask the store.
	Closed BreakerState = iota
	// HalfOpen: the store answers pings again and requests ask it; the first that fails reopens.
	HalfOpen
	// Open: no request touches the store.
	Open
)

func (s BreakerState) String() string {
	switch s {
	case Closed:
		return "closed"
	case HalfOpen:
		return "half-open"
	default:
		return "open"
	}
}

// Breaker stops requests from waiting for a store that does not answer. Three bad pings
// in a row open it, or three failed debits; three good pings half-open it, also without traffic.
type Breaker struct {
	changed func(BreakerState)
	state   atomic.Int32
	failed  atomic.Int32 // debits in a row

	mu        sync.Mutex // serialises changes of state
	bad, good int        // pings in a row
}

// NewBreaker is a closed breaker; changed, if not nil, hears of each change of state, in order.
func NewBreaker(changed func(BreakerState)) *Breaker {
	if changed == nil {
		changed = func(BreakerState) {}
	}
	return &Breaker{changed: changed}
}

// State is the current state.
func (b *Breaker) State() BreakerState { return BreakerState(b.state.Load()) }

// Debit takes the result of a request that asked the store.
func (b *Breaker) Debit(ok bool) {
	if ok && b.failed.Load() == 0 && b.State() == Closed {
		return // nearly always
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.State() == Open {
		return // the call began before it opened
	}
	if ok {
		b.failed.Store(0)
		b.set(Closed)
		return
	}
	if b.failed.Add(1) >= trip {
		b.open()
	}
}

// Ping takes a ping sample.
func (b *Breaker) Ping(ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ok {
		b.good, b.bad = b.good+1, 0
	} else {
		b.good, b.bad = 0, b.bad+1
	}
	switch {
	case b.State() != Open && b.bad >= trip:
		b.open()
	case b.State() == Open && b.good >= trip:
		b.failed.Store(trip - 1)
		b.set(HalfOpen)
	}
}

func (b *Breaker) open() {
	b.good = 0
	b.failed.Store(0)
	b.set(Open)
}

func (b *Breaker) set(s BreakerState) {
	if BreakerState(b.state.Swap(int32(s))) != s {
		b.changed(s)
	}
}

// Run samples ping until ctx ends.
func (b *Breaker) Run(ctx context.Context, ping func(context.Context) error) {
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		sample, cancel := context.WithTimeout(ctx, pingTimeout)
		err := ping(sample)
		late := sample.Err() != nil
		cancel()
		if ctx.Err() != nil {
			return
		}
		b.Ping(err == nil && !late)
	}
}

package admission

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

const (
	pingInterval = 100 * time.Millisecond
	// pingTimeout is the slowest good sample while the breaker is closed, recoveredPing that while it is not: a
	// store that answers later than requests wait would only be tried in vain.
	pingTimeout   = 200 * time.Millisecond
	recoveredPing = 50 * time.Millisecond
	// trip is how many bad samples in a row open the breaker, and how many good ones, pings and then requests, end that.
	trip = 3
	// firstWait is the pause after a try that failed. It doubles with each up to mostWait, until the breaker
	// has been closed for steady.
	firstWait = 250 * time.Millisecond
	mostWait  = 2 * time.Second
	steady    = 10 * time.Second
)

// BreakerState says whether requests ask the shared store.
type BreakerState int32

const (
	// Closed: requests ask the store.
	Closed BreakerState = iota
	// HalfOpen: the store answers pings again and one request at a time asks it; the first that fails reopens.
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
// in a row open it, or three failed requests. Three good pings half-open it, also without traffic, and then
// three requests that succeed, one after the other, close it. What fails once more is tried ever more rarely, so
// that a store at the edge of its strength does not make the breaker flap.
type Breaker struct {
	now     func() time.Time
	changed func(BreakerState)
	state   atomic.Int32
	failed  atomic.Int32 // requests in a row, while closed

	mu        sync.Mutex // serialises changes of state
	bad, good int        // pings in a row
	trials    Pass       // the number of the last trial
	trying    bool       // that one is under way
	succeeded int        // trials in a row
	wait      time.Duration
	since     time.Time // of the state
}

// Pass lets a request ask the store, or not. Above Passed it is the number of a trial, which the breaker waits for.
type Pass uint64

const (
	// Refused: it must not ask.
	Refused Pass = iota
	// Passed: it may.
	Passed
)

// NewBreaker is a closed breaker; changed, if not nil, hears of each change of state, in order.
func NewBreaker(now func() time.Time, changed func(BreakerState)) *Breaker {
	if changed == nil {
		changed = func(BreakerState) {}
	}
	return &Breaker{now: now, changed: changed, trials: Passed}
}

// State is the current state.
func (b *Breaker) State() BreakerState { return BreakerState(b.state.Load()) }

// Pass says whether a request may ask the store. Then Debit must be told what came of it.
func (b *Breaker) Pass() Pass {
	if b.State() == Closed {
		return Passed
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.State() == Closed:
		return Passed
	case b.State() == HalfOpen && !b.trying:
		b.trying = true
		b.trials++
		return b.trials
	default:
		return Refused
	}
}

// Debit takes the result of a request that asked the store.
func (b *Breaker) Debit(p Pass, ok bool) {
	if p == Passed && ok && b.failed.Load() == 0 {
		return // nearly always
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case p == Passed && b.State() != Closed: // the call began before it opened
	case p == Passed && ok:
		b.failed.Store(0)
	case p == Passed:
		if b.failed.Add(1) >= trip {
			if b.now().Sub(b.since) > steady {
				b.wait = 0
			} else {
				b.backOff()
			}
			b.open()
		}
	case b.State() != HalfOpen || p != b.trials || !b.trying: // pings reopened it meanwhile
	case ok:
		b.trying = false
		if b.succeeded++; b.succeeded >= trip {
			b.set(Closed)
		}
	default:
		b.backOff()
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
	case b.State() == Open && b.good >= trip && b.now().Sub(b.since) >= b.wait:
		b.trying, b.succeeded = false, 0
		b.set(HalfOpen)
	}
}

func (b *Breaker) backOff() { b.wait = min(max(2*b.wait, firstWait), mostWait) }

func (b *Breaker) open() {
	b.good = 0
	b.failed.Store(0)
	b.set(Open)
}

func (b *Breaker) set(s BreakerState) {
	if BreakerState(b.state.Swap(int32(s))) != s {
		b.since = b.now()
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
		began := time.Now()
		err := ping(sample)
		late := sample.Err() != nil || b.State() != Closed && time.Since(began) > recoveredPing
		cancel()
		if ctx.Err() != nil {
			return
		}
		b.Ping(err == nil && !late)
	}
}

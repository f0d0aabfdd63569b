package admission

import (
	"sync/atomic"
	"time"
)

// StoreClock is the store's clock as last seen, carried on by this process's
// monotonic clock: a step of the edge's wall clock changes nothing. Until the store
// has been heard it starts from the wall clock.
type StoreClock struct {
	start  time.Time
	now    func() time.Time
	offset atomic.Int64 // store's clock less the time since start, microseconds
}

// NewStoreClock reads the time from now, which must be monotonic as time.Now is.
func NewStoreClock(now func() time.Time) *StoreClock {
	c := &StoreClock{start: now(), now: now}
	c.offset.Store(c.start.UnixMicro())
	return c
}

// Micros is the store's clock, Unix microseconds.
func (c *StoreClock) Micros() int64 { return c.at(c.Elapsed()) }

// Elapsed is this process's monotonic clock, microseconds since the start; no step of the store's changes it.
func (c *StoreClock) Elapsed() int64 { return c.now().Sub(c.start).Microseconds() }

// at is the store's clock when the monotonic one says elapsed.
func (c *StoreClock) at(elapsed int64) int64 { return c.offset.Load() + elapsed }

// Observe takes what the store's clock said just now.
func (c *StoreClock) Observe(micros int64) {
	c.offset.Store(micros - c.Elapsed())
}

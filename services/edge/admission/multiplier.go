package admission

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// multiplierLife is how long a multiplier holds without a new tick: a dead healthwatch
// must not pin the limits low.
const multiplierLife = 15 * time.Second

// Multipliers holds the latest multiplier of each upstream.
type Multipliers struct {
	now  func() time.Time
	mu   sync.Mutex // serialises writers
	last atomic.Pointer[map[string]multiplier]
}

type multiplier struct {
	m       int64
	expires time.Time
}

// NewMultipliers reads the time from now.
func NewMultipliers(now func() time.Time) *Multipliers {
	m := &Multipliers{now: now}
	m.last.Store(&map[string]multiplier{})
	return m
}

// Set takes a tick that is age old already.
func (m *Multipliers) Set(upstream string, millionths int64, age time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	next := maps.Clone(*m.last.Load())
	next[upstream] = multiplier{
		m:       min(max(millionths, bucket.FloorMultiplier), bucket.One),
		expires: m.now().Add(multiplierLife - max(age, 0)),
	}
	m.last.Store(&next)
}

// Get is the upstream's multiplier in millionths; bucket.One where none is known or the last has expired.
func (m *Multipliers) Get(upstream string) int64 {
	last, ok := (*m.last.Load())[upstream]
	if !ok || m.now().After(last.expires) {
		return bucket.One
	}
	return last.m
}

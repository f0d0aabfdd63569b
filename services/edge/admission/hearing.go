package admission

import "sync/atomic"

// deaf is how long a denial holds while changes of buckets may go unheard, in microseconds.
const deaf = 1_000_000

// hearing is whether this edge hears of changed buckets. It sends itself an echo several times a
// second, the way that changes come: what was remembered before the last gap may be wrong by now.
type hearing struct {
	// gaps counts the times that an echo was missed.
	gaps atomic.Uint64
	// last is when the newest echo that came back had been sent, microseconds; 0: none yet.
	last atomic.Int64
}

func (h *hearing) state() uint64 { return h.gaps.Load() }

// holds reports whether a denial made at made in a state still does at now.
func (h *hearing) holds(state uint64, made, now int64) bool {
	return now-made <= deaf || state == h.gaps.Load() && now-h.last.Load() <= deaf && h.last.Load() > 0
}

// Echo takes an echo that came back: when it was sent, by the edge's monotonic clock in microseconds
// (StoreClock.Elapsed); missed says that one before it was not, or that the connection was lost since.
func (m *Memory) Echo(sent int64, missed bool) {
	if missed {
		m.hearing.gaps.Add(1)
	}
	m.hearing.last.Store(sent)
}

package admission

import (
	"sync"
	"sync/atomic"
	"time"
)

const (
	// BeatInterval is how often an edge says that it is alive.
	BeatInterval = time.Second
	// beatLife is how long an edge counts as live after it was heard.
	beatLife = 3 * time.Second
	// maxPeers bounds the memory that heartbeats can take.
	maxPeers = 4096
)

// Fleet counts the live edges, this one included, by the heartbeats of their boots.
//
// The others' silence is measured against this edge's own beats, as NATS brings them
// back: while those do not come, nobody can be heard, and the last count stands.
type Fleet struct {
	boot string
	live atomic.Int64

	mu    sync.Mutex
	ours  time.Time                // when our own beat came back last
	heard time.Duration            // for how long we have been able to hear, in all
	peers map[string]time.Duration // boot → heard, when it was last
}

// NewFleet is a fleet of one: the edge incarnation named boot.
func NewFleet(boot string) *Fleet {
	f := &Fleet{boot: boot, peers: make(map[string]time.Duration)}
	f.live.Store(1)
	return f
}

// Live is the number of live edges, at least 1.
func (f *Fleet) Live() int64 { return f.live.Load() }

// Heard takes a heartbeat that arrived at now; leaving is an edge's last.
func (f *Fleet) Heard(boot string, leaving bool, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case boot == f.boot:
		// After an outage the beat that comes back proves one interval of hearing, not the outage's length.
		if !f.ours.IsZero() {
			f.heard += min(now.Sub(f.ours), BeatInterval*3/2)
		}
		f.ours = now
		for peer, at := range f.peers {
			if f.heard-at > beatLife {
				delete(f.peers, peer)
			}
		}
	case leaving:
		delete(f.peers, boot)
	default:
		if _, known := f.peers[boot]; known || len(f.peers) < maxPeers {
			f.peers[boot] = f.heard
		}
	}
	f.live.Store(int64(len(f.peers)) + 1)
}

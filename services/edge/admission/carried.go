package admission

import (
	"hash/maphash"
	"sync"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// DefaultCarried is how many token buckets an edge remembers.
const DefaultCarried = 1 << 17

// Carried is what an edge saw last of each token bucket. It goes along with every question to the store,
// which by it mends what it has lost (store.Seen), and is where an edge that has to decide alone begins.
// It is bounded: what is forgotten is not mended by this edge. Safe for concurrent use.
type Carried struct {
	seed   maphash.Seed
	most   int // of a shard
	shards [carriedShards]carriedShard
}

const carriedShards = 64

type carriedShard struct {
	mu   sync.Mutex
	seen map[bucketOf]store.Seen
}

type bucketOf struct{ client, scope string }

// NewCarried remembers that many buckets at the most.
func NewCarried(most int) *Carried {
	s := &Carried{seed: maphash.MakeSeed(), most: max(1, most/carriedShards)}
	for i := range s.shards {
		s.shards[i].seen = make(map[bucketOf]store.Seen)
	}
	return s
}

func (s *Carried) shard(client string) *carriedShard {
	return &s.shards[maphash.String(s.seed, client)%carriedShards]
}

// recall is what was seen of a check's buckets; nil: nothing.
func (s *Carried) recall(c store.Check) []store.Seen {
	sh := s.shard(c.Client)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	var all []store.Seen
	for i, l := range c.Limits {
		seen, ok := sh.seen[bucketOf{c.Client, l.Scope}]
		if !ok || l.Spec.Kind != bucket.TokenBucket {
			continue
		}
		if all == nil {
			all = make([]store.Seen, len(c.Limits))
		}
		all[i] = seen
	}
	return all
}

// learn remembers what the store answered. Answers may come out of order.
func (s *Carried) learn(c store.Check, d store.Decision) {
	sh := s.shard(c.Client)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for i, l := range c.Limits {
		k, got := bucketOf{c.Client, l.Scope}, d.Limits[i]
		old, known := sh.seen[k]
		switch {
		case known && (old.Time > d.Now || old.Time == d.Now && old.Gen == got.Gen && old.Seq > got.Seq):
			continue
		case l.Spec.Kind != bucket.TokenBucket || got.Gen == 0: // full, so that there is nothing to lose
			delete(sh.seen, k)
			continue
		case !known && len(sh.seen) >= s.most:
			for forgotten := range sh.seen { // any will do: what is hot comes back at once
				delete(sh.seen, forgotten)
				break
			}
		}
		sh.seen[k] = store.Seen{Gen: got.Gen, Seq: got.Seq, Settled: got.Settled, Tokens: got.Remaining, Grace: got.Grace, Time: d.Now}
	}
}

// forget drops what an administrator has made untrue.
func (s *Carried) forget(b events.ChangedBucket) {
	sh := s.shard(b.Client)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if b.Scope != "" {
		delete(sh.seen, bucketOf{b.Client, b.Scope})
		return
	}
	for k := range sh.seen {
		if k.client == b.Client {
			delete(sh.seen, k)
		}
	}
}

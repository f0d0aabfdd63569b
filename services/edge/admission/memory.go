package admission

import (
	"hash/maphash"
	"sync"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

const (
	memoryShards = 64
	// DefaultMemory is how many routes of clients an edge remembers leases and denials of.
	DefaultMemory = 1 << 16
	// spots is how many routes of clients a shard watches for being hot, without remembering them.
	spots = 1 << 12
	// sample is how many are looked at to find the one to forget.
	sample = 8
)

// Memory is what an edge remembers of its clients, by client and route: the tokens leased to it and
// the denials that still hold. Whom there is nothing to remember of costs nothing: only how hot they
// run is kept, in a table of fixed size. It is bounded; see forget. Safe for concurrent use.
type Memory struct {
	seed   maphash.Seed
	most   int // keys of a shard
	shards [memoryShards]memoryShard

	hearing hearing

	mu      sync.Mutex
	returns []unspent
}

type memoryShard struct {
	mu sync.Mutex
	// keys has the first of a client's keys, by its id.
	keys map[string]*key
	size int
	// leased are the keys with grants.
	leased map[*key]struct{}
	spots  []spot
	// changes counts what was heard of this shard's buckets: an answer that was asked for before
	// the last of it may no longer hold.
	changes uint64

	hits, denials, forgotten uint64
}

// key is what is remembered of one client on one route.
type key struct {
	next   *key // the client's on another route
	client string
	terms
	heat   heat
	grants []grant   // oldest first
	seen   *sighting // by requests for a lease; nil: not yet
	denial *denial
	flight *flight
	// revoked counts the times that its leases were called back.
	revoked uint64
}

// sighting is what the store's last answer left of each limit, and when, by the edge's monotonic clock in microseconds.
type sighting struct {
	at     int64
	states []store.LimitState
	// drained is how fast each limit had gone down before.
	drained []float64
}

// drain is how fast each limit has gone down since then by what others took, in micro-tokens a microsecond;
// not below guess, where it was not seen before or a moment ago. They take by the lease, in lumps: what was seen
// before counts for half.
func (s *sighting) drain(states []store.LimitState, now int64, guess float64) []float64 {
	out := make([]float64, len(states))
	for i, l := range states {
		if s == nil || now-s.at < idle {
			out[i] = guess
		}
		if s != nil && now > s.at {
			out[i] = max(out[i], float64(s.states[i].Remaining-l.Remaining-l.Charged)/float64(now-s.at), s.drained[i]/2)
		}
	}
	return out
}

// terms are what a key's leases and denials were answered under. They are void under others.
type terms struct {
	table  *policy.Table
	route  string
	limits []policy.ScopedLimit
	cost   int64
	// m is the multiplier in millionths.
	m int64
}

// denial is a red answer that holds until a moment, by the edge's monotonic clock in microseconds.
type denial struct {
	made, until int64
	heard       uint64 // hearing.state when it was asked for
	limits      []store.Limit
	states      []store.LimitState
}

// spot watches whichever client and route fell on it last.
type spot struct {
	tag uint32
	heat
}

// heat is how often something is asked for: about so many times a second.
type heat struct {
	level float32
	at    int64 // microseconds, monotonic
}

// add counts a request at now. What was counted fades within a second.
func (h *heat) add(now int64) float32 {
	h.level = h.faded(now) + 1
	h.at = now
	return h.level
}

func (h *heat) faded(now int64) float32 {
	return h.level * max(0, 1-float32(now-h.at)/1e6)
}

// NewMemory remembers at most so many routes of clients.
func NewMemory(most int) *Memory {
	m := &Memory{seed: maphash.MakeSeed(), most: max(1, most/memoryShards)}
	for i := range m.shards {
		m.shards[i] = memoryShard{keys: map[string]*key{}, leased: map[*key]struct{}{}, spots: make([]spot, spots)}
	}
	return m
}

// shard is the shard of a client, and a hash of it.
func (m *Memory) shard(client string) (*memoryShard, uint64) {
	h := maphash.String(m.seed, client)
	return &m.shards[h%memoryShards], h / memoryShards
}

// intern is id as a string: the one that is here already, for those who are remembered.
func (m *Memory) intern(id []byte) string {
	if m == nil {
		return string(id)
	}
	s := &m.shards[maphash.Bytes(m.seed, id)%memoryShards]
	s.mu.Lock()
	k := s.keys[string(id)]
	s.mu.Unlock()
	if k != nil {
		return k.client
	}
	return string(id)
}

// find is the key of a client on a route, nil if there is none.
func (s *memoryShard) find(client, route string) *key {
	k := s.keys[client]
	for k != nil && k.route != route {
		k = k.next
	}
	return k
}

// watch counts a request of someone who has no key. A spot passes on when its owner has gone quiet.
func (s *memoryShard) watch(hash uint64, route string, now int64) float32 {
	for i := range len(route) {
		hash = (hash ^ uint64(route[i])) * 1099511628211
	}
	p, tag := &s.spots[hash%spots], uint32(hash>>32)
	if p.tag != tag {
		if p.faded(now) >= 1 {
			return 0
		}
		*p = spot{tag: tag}
	}
	return p.add(now)
}

// add makes a key, and forgets another where the shard is full. worth is how long the new one will
// be of use, in microseconds. It is nil where everything else is worth more.
func (s *memoryShard) add(client string, t terms, most int, worth, now int64) *key {
	if s.size >= most && !s.forget(worth, now) {
		return nil
	}
	k := &key{client: client, terms: t, next: s.keys[client]}
	s.keys[client] = k
	s.size++
	return k
}

// forget drops the least of a few keys, if it is worth no more than worth: one with nothing left to
// remember, else the denial that ends first. So debtors, who are refused for longest, stay, and
// leases always do: what they hold is paid for.
func (s *memoryShard) forget(worth, now int64) bool {
	var least *key
	n := 0
	for _, k := range s.keys {
		for ; k != nil; k = k.next {
			if len(k.grants) > 0 || k.flight != nil {
				continue
			}
			if w := k.worth(now); w <= worth {
				least, worth = k, w
			}
		}
		if n++; n >= sample {
			break
		}
	}
	if least == nil {
		return false
	}
	s.remove(least)
	s.forgotten++
	return true
}

// worth is for how long a key's denial still holds.
func (k *key) worth(now int64) int64 {
	if k.denial == nil {
		return 0
	}
	return max(0, k.denial.until-now)
}

func (s *memoryShard) remove(gone *key) {
	first := s.keys[gone.client]
	if first == gone {
		if gone.next == nil {
			delete(s.keys, gone.client)
		} else {
			s.keys[gone.client] = gone.next
		}
	} else {
		for k := first; k != nil; k = k.next {
			if k.next == gone {
				k.next = gone.next
			}
		}
	}
	s.size--
}

// same reports whether what was answered under t holds under o.
func (t *terms) same(o *terms) bool {
	if t.cost != o.cost || t.m != o.m || len(t.limits) != len(o.limits) {
		return false
	}
	if t.table == o.table && &t.limits[0] == &o.limits[0] {
		return true
	}
	for i := range t.limits {
		if t.limits[i] != o.limits[i] {
			return false
		}
	}
	return true
}

// Changed forgets what is remembered of a bucket: its denials, unless it is in debt; its leases, which
// go back, unless it has only gained tokens.
func (m *Memory) Changed(b events.ChangedBucket) {
	s, _ := m.shard(b.Client)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes++
	for k := s.keys[b.Client]; k != nil; k = k.next {
		if !k.has(b.Scope) {
			continue
		}
		if b.Why != events.ChangedDebt {
			k.denial = nil
		}
		if b.Why != events.ChangedGain {
			k.revoked++
			m.revoke(s, k)
		}
	}
}

func (t *terms) has(scope string) bool {
	for _, l := range t.limits {
		if scope == "" || l.Scope == scope {
			return true
		}
	}
	return false
}

// MemoryStats are what a Memory did and holds.
type MemoryStats struct {
	// Keys are remembered now, Leased of them with tokens.
	Keys, Leased int
	// LeaseHits and Denials were answered from memory; Forgotten keys made room for others.
	LeaseHits, Denials, Forgotten uint64
}

// Stats reports what happened since the start.
func (m *Memory) Stats() MemoryStats {
	var st MemoryStats
	for i := range m.shards {
		s := &m.shards[i]
		s.mu.Lock()
		st.Keys += s.size
		st.Leased += len(s.leased)
		st.LeaseHits += s.hits
		st.Denials += s.denials
		st.Forgotten += s.forgotten
		s.mu.Unlock()
	}
	return st
}

// remaining is the least share of any limit that is left, 0 to 1.
func remaining(limits []store.Limit, states []store.LimitState) float64 {
	least := 1.0
	for i, l := range limits {
		least = min(least, fraction(l, states[i]))
	}
	return max(0, least)
}

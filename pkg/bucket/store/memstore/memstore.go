package memstore

import (
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// Store is a store.Store in memory.
type Store struct {
	clock  func() int64
	shards [store.Shards]shard
}

// shard is what Redis holds under one hash tag.
type shard struct {
	mu      sync.Mutex
	buckets map[key]entry
	meta    store.Meta
	boots   map[string]counter
}

// key names a bucket. The kind stands for the key's prefix in Redis.
type key struct {
	kind          bucket.Kind
	scope, client string
}

// entry is what the fields of a bucket's hash hold, and its time to live.
type entry struct {
	state    bucket.State
	gen, seq int64
	settled  uint64
	expires  int64
}

// counter is the last batch settled of a boot, and the sequence it came under.
type counter struct{ n, seq uint64 }

var _ store.Store = (*Store)(nil)

// New returns an empty store. clock answers Unix microseconds; nil: the system's clock.
func New(clock func() int64) *Store {
	if clock == nil {
		clock = func() int64 { return time.Now().UnixMicro() }
	}
	s := &Store{clock: clock}
	for i := range s.shards {
		s.shards[i].buckets = map[key]entry{}
		s.shards[i].boots = map[string]counter{}
	}
	return s
}

// Check implements store.Store.
func (s *Store) Check(ctx context.Context, c store.Check) (store.Decision, error) {
	if err := c.Validate(); err != nil {
		return store.Decision{}, err
	}
	if ctx.Err() != nil {
		return store.Decision{}, store.ErrUnavailable
	}
	sh := &s.shards[store.ShardOf(c.Client)]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	now := s.clock()

	var (
		entries [store.MaxLimits]bucket.Entry
		stored  [store.MaxLimits]entry
	)
	decided := entries[:len(c.Limits)]
	for i, l := range c.Limits {
		stored[i] = sh.read(key{l.Spec.Kind, l.Scope, c.Client}, l.Spec, now)
		decided[i] = bucket.Entry{Spec: l.Spec, State: stored[i].state}
	}
	d := store.Decision{
		Tier:   bucket.Decide(decided, c.Cost, now, c.Shadow),
		Now:    now,
		Limits: make([]store.LimitState, len(c.Limits)),
	}
	for i, e := range decided {
		if e.Charged > 0 || e.GraceCharged > 0 {
			stored[i].state = e.State
			sh.write(key{e.Spec.Kind, c.Limits[i].Scope, c.Client}, &stored[i], e.Spec, now)
		}
		d.Limits[i] = store.LimitState{
			Tier:         e.Tier,
			Remaining:    e.Remaining,
			Grace:        e.Grace,
			Wait:         e.Wait,
			Reset:        e.Reset,
			Charged:      e.Charged,
			GraceCharged: e.GraceCharged,
			Window:       e.Window,
			Gen:          stored[i].gen,
			Seq:          stored[i].seq,
			Settled:      stored[i].settled,
		}
	}
	return d, nil
}

// Settle implements store.Store.
func (s *Store) Settle(ctx context.Context, st store.Settlement) (store.Settled, error) {
	if err := st.Validate(); err != nil {
		return store.Settled{}, err
	}
	if ctx.Err() != nil {
		return store.Settled{}, store.ErrUnavailable
	}
	sh := &s.shards[st.Shard]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	now := s.clock()

	switch cursor := sh.meta.Cursor; {
	case sh.meta.Epoch == "" || sh.meta.Stream != st.Stream:
		return store.Settled{Status: store.Lost, Cursor: cursor}, nil
	case cursor < st.Prev:
		return store.Settled{Status: store.Rewind, Cursor: cursor}, nil
	case st.Seq <= cursor:
		return store.Settled{Status: store.Behind, Cursor: cursor}, nil
	}
	sh.meta.Cursor = st.Seq
	done := store.Settled{Status: store.Applied, Cursor: st.Seq}
	if st.Boot != "" {
		n := sh.boots[st.Boot].n
		if st.N <= n {
			done.Status = store.Duplicate
		} else {
			done.Items = sh.apply(st, now)
			n = st.N
		}
		sh.boots[st.Boot] = counter{n, st.Seq}
	}
	for boot, c := range sh.boots {
		if c.seq < st.Oldest {
			delete(sh.boots, boot)
		}
	}
	return done, nil
}

func (sh *shard) apply(st store.Settlement, now int64) []store.ItemState {
	out := make([]store.ItemState, len(st.Items))
	for i, it := range st.Items {
		k := key{it.Spec.Kind, it.Scope, it.Client}
		e := sh.read(k, it.Spec, now)
		if e.gen == 0 { // absent, so full when it was charged
			e.state = bucket.Full(it.Spec, min(it.Time, now))
		}
		if e.settled < st.Seq || named(st.Items[:i], it) {
			var forgiven int64
			if e.gen != 0 {
				e.state = e.state.At(it.Spec, now)
			}
			e.state, forgiven = e.state.Settle(it.Spec, it.Delta, it.Window)
			e.state = e.state.At(it.Spec, now)
			e.settled = st.Seq
			out[i].Forgiven = forgiven
			sh.write(k, &e, it.Spec, now)
		}
		out[i].Remaining, _ = e.state.At(it.Spec, now).Balance(it.Spec, now)
		out[i].Gen, out[i].Seq = e.gen, e.seq
	}
	return out
}

// named says whether an item before it, of the same settlement, is about the same bucket.
func named(before []store.Item, it store.Item) bool {
	for _, b := range before {
		if b.Client == it.Client && b.Scope == it.Scope && b.Spec.Kind == it.Spec.Kind {
			return true
		}
	}
	return false
}

// Meta implements store.Store.
func (s *Store) Meta(ctx context.Context, shard int) (store.Meta, error) {
	if err := store.ValidateShard(shard); err != nil {
		return store.Meta{}, err
	}
	return s.onMeta(ctx, shard, func(*store.Meta) {})
}

// Begin implements store.Store.
func (s *Store) Begin(ctx context.Context, shard int, stream string, cursor uint64) (store.Meta, error) {
	if err := store.ValidateBegin(shard, stream, cursor); err != nil {
		return store.Meta{}, err
	}
	return s.onMeta(ctx, shard, func(m *store.Meta) {
		if m.Epoch == "" {
			*m = store.Meta{Epoch: strconv.FormatInt(s.clock(), 10), Stream: stream, Cursor: cursor}
		}
	})
}

func (s *Store) onMeta(ctx context.Context, shard int, change func(*store.Meta)) (store.Meta, error) {
	if ctx.Err() != nil {
		return store.Meta{}, store.ErrUnavailable
	}
	sh := &s.shards[shard]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	change(&sh.meta)
	return sh.meta, nil
}

// read is the bucket as stored, or a full one with gen 0.
func (sh *shard) read(k key, spec bucket.Spec, now int64) entry {
	if e, ok := sh.buckets[k]; ok && e.expires > now {
		return e
	}
	return entry{state: bucket.Full(spec, now)}
}

// write stores e as the bucket's next change.
func (sh *shard) write(k key, e *entry, spec bucket.Spec, now int64) {
	if e.gen == 0 {
		e.gen = now
		sh.sweep(now)
	}
	e.seq++
	e.expires = now + e.state.Lifetime(spec, now)
	sh.buckets[k] = *e
}

// sweep drops a few expired buckets, from a random place. Called for each new bucket, it keeps
// the map within a constant factor of what lives.
func (sh *shard) sweep(now int64) {
	const atOnce = 4
	n := 0
	for k, e := range sh.buckets {
		if e.expires <= now {
			delete(sh.buckets, k)
		}
		if n++; n == atOnce {
			return
		}
	}
}

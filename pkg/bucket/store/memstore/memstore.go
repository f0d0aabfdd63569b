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
	buckets map[key]Bucket
	most    int // buckets; 0: no bound
	meta    store.Meta
	// base is what earlier streams counted up to; base + sequence never falls.
	base  uint64
	boots map[string]counter
}

// key names a bucket. The kind stands for the key's prefix in Redis.
type key struct {
	kind          bucket.Kind
	scope, client string
}

// other is the key under which the bucket was kept before its algorithm was switched.
func (k key) other() key {
	switch k.kind {
	case bucket.TokenBucket:
		k.kind = bucket.SlidingWindow
	case bucket.SlidingWindow:
		k.kind = bucket.TokenBucket
	}
	return k
}

// Bucket is a stored bucket: what the fields of its hash hold in Redis, and its time to live.
type Bucket struct {
	State bucket.State
	// Spec is the one it was last written under.
	Spec bucket.Spec
	// Gen is the clock at its creation, Seq counts changes since, Settled is the last stream
	// sequence settled into it.
	Gen, Seq int64
	Settled  uint64
	// Reset is when an administrator made the bucket full, 0: never. A token bucket's only.
	Reset int64
	// Expires is when the bucket is gone, Unix microseconds; whole milliseconds, as in Redis.
	Expires int64
}

// counter is the last batch settled of a boot, and the sequence it came under.
type counter struct{ n, seq uint64 }

var _ store.Store = (*Store)(nil)

// Option changes a Store.
type Option func(*Store)

// AtMost bounds a store to about n buckets. A new one then takes the place of the fullest of a few: it is the one
// that loses the least by being forgotten, and so taken for full.
func AtMost(n int) Option {
	return func(s *Store) {
		for i := range s.shards {
			s.shards[i].most = max(1, n/store.Shards)
		}
	}
}

// New returns an empty store. clock answers Unix microseconds; nil: the system's clock.
func New(clock func() int64, opts ...Option) *Store {
	if clock == nil {
		clock = func() int64 { return time.Now().UnixMicro() }
	}
	s := &Store{clock: clock}
	for i := range s.shards {
		s.shards[i].buckets = map[key]Bucket{}
		s.shards[i].boots = map[string]counter{}
	}
	for _, o := range opts {
		o(s)
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
		stored  [store.MaxLimits]Bucket
		healed  [store.MaxLimits]bool
	)
	decided := entries[:len(c.Limits)]
	for i, l := range c.Limits {
		_, stored[i] = sh.read(key{l.Spec.Kind, l.Scope, c.Client}, l.Spec, now)
		if len(c.Seen) > 0 {
			healed[i] = stored[i].heal(c.Seen[i], l.Spec, now)
		}
		decided[i] = bucket.Entry{Spec: l.Spec, State: stored[i].State.As(stored[i].Spec, l.Spec, now)}
	}
	v := bucket.Decide(decided, bucket.Request{Cost: c.Cost, Want: c.Want, Share: c.Share, Shadow: c.Shadow}, now)
	d := store.Decision{
		Tier:    v.Tier,
		Now:     now,
		Granted: v.Granted,
		Until:   v.Until,
		Limits:  make([]store.LimitState, len(c.Limits)),
	}
	for i, e := range decided {
		switched := stored[i].Spec.Kind != e.Spec.Kind || stored[i].Spec.Window != e.Spec.Window
		if e.Charged > 0 || e.GraceCharged > 0 || (switched || healed[i]) && c.Cost > 0 {
			stored[i].State = e.State
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
			Gen:          stored[i].Gen,
			Seq:          stored[i].Seq,
			Settled:      stored[i].Settled,
			Healed:       healed[i],
		}
	}
	return d, nil
}

// heal goes on from what was seen, if that is lower and e is not what followed it (see store.Seen).
func (e *Bucket) heal(seen store.Seen, spec bucket.Spec, now int64) bool {
	if seen.Gen == 0 || e.Spec.Kind != spec.Kind || e.Gen == seen.Gen && e.Seq >= seen.Seq || seen.Time <= e.Reset {
		return false
	}
	state, healed := e.State.Heal(bucket.Token{Tokens: seen.Tokens, Grace: seen.Grace, Last: seen.Time}, spec, now)
	if healed {
		e.State, e.Gen, e.Seq, e.Settled = state, seen.Gen, seen.Seq, seen.Settled
	}
	return healed
}

// Return implements store.Store.
func (s *Store) Return(ctx context.Context, r store.Return) error {
	if err := r.Validate(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return store.ErrUnavailable
	}
	sh := &s.shards[store.ShardOf(r.Client)]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	now := s.clock()
	for _, l := range r.Limits {
		k := key{l.Spec.Kind, l.Scope, r.Client}
		e, ok := sh.buckets[k]
		if !ok || e.Expires <= now || e.Gen != l.Gen || e.Spec.Window != l.Spec.Window || e.Spec.Capacity < l.Spec.Capacity {
			continue
		}
		spec := l.Spec
		if spec.Capacity != e.Spec.Capacity || spec.Rate != e.Spec.Rate {
			spec = stored(e.Spec, spec)
		}
		e.State, _ = e.State.At(spec, now).Settle(spec, -r.Amount, l.Window)
		sh.write(k, &e, spec, now)
	}
	return nil
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
	due := map[key]bool{} // a bucket may have several items: one per window, or per algorithm
	for i, it := range st.Items {
		k, e := sh.read(key{it.Spec.Kind, it.Scope, it.Client}, it.Spec, now)
		if _, seen := due[k]; !seen {
			due[k] = e.Settled < sh.base+st.Seq
		}
		spec := kept(e.Spec, it.Spec)
		if e.Gen == 0 { // absent, so full when it was charged
			e.State = bucket.Full(spec, min(it.Time, now))
		} else {
			e.State = e.State.At(spec, now)
		}
		if due[k] {
			e.State, out[i].Forgiven = e.State.Settle(spec, it.Delta, e.State.WindowOf(it.Window, it.Spec, spec))
			e.State = e.State.At(spec, now)
			e.Settled = sh.base + st.Seq
			sh.write(k, &e, spec, now)
		}
		out[i].Remaining, _ = e.State.Balance(spec, now)
		out[i].Gen, out[i].Seq = e.Gen, e.Seq
	}
	return out
}

// Adjust implements store.Store.
func (s *Store) Adjust(ctx context.Context, a store.Adjustment) (store.ItemState, error) {
	if err := a.Validate(); err != nil {
		return store.ItemState{}, err
	}
	if ctx.Err() != nil {
		return store.ItemState{}, store.ErrUnavailable
	}
	sh := &s.shards[store.ShardOf(a.Client)]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	now := s.clock()
	spec := a.Limit.Spec
	k := key{spec.Kind, a.Limit.Scope, a.Client}
	_, e := sh.read(k, spec, now)
	if a.Reset {
		e.State, e.Gen, e.Seq, e.Reset = bucket.Full(spec, now), max(now, e.Gen+1), 0, now
	} else {
		e.State = e.State.As(e.Spec, spec, now).At(spec, now).Give(spec, a.Grant)
	}
	sh.write(k, &e, spec, now)
	remaining, _ := e.State.Balance(spec, now)
	return store.ItemState{Remaining: remaining, Gen: e.Gen, Seq: e.Seq}, nil
}

// kept is the spec to settle an item of spec into a bucket last written under stored: the
// item's own, unless the algorithm or window has been switched since it was charged.
func kept(was, spec bucket.Spec) bucket.Spec {
	if was.Kind == spec.Kind && was.Window == spec.Window {
		return spec
	}
	return stored(was, spec)
}

// stored is the spec that a bucket was last written under, where spec is not.
func stored(was, spec bucket.Spec) bucket.Spec {
	was.MaxDebt = spec.MaxDebt
	was.Grace = was.Capacity // the most it can be; a check cuts what is above its own
	if was.Kind == bucket.TokenBucket {
		was.SlowestRate = max(1, was.Rate/5) // no slower than at bucket.FloorMultiplier
	}
	return was
}

// Lower leaves a client's bucket with balance and grace at the most, in micro-tokens, as of now.
func (s *Store) Lower(client string, l store.Limit, balance, grace int64) {
	sh := &s.shards[store.ShardOf(client)]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	now := s.clock()
	_, e := sh.read(key{l.Spec.Kind, l.Scope, client}, l.Spec, now)
	st := e.State.As(e.Spec, l.Spec, now).At(l.Spec, now)
	has, hasGrace := st.Balance(l.Spec, now)
	if has <= balance && hasGrace <= grace {
		return
	}
	st, _ = st.Settle(l.Spec, max(0, has-balance), st.WindowIndex())
	if over := max(0, hasGrace-grace); st.Kind == bucket.TokenBucket {
		st.Token.Grace -= over
	} else {
		st.Window.Cur.Grace += over
	}
	e.State = st
	sh.write(key{l.Spec.Kind, l.Scope, client}, &e, l.Spec, now)
}

// Bucket is a client's bucket as it is stored, if it is: for tests and for looking at it.
func (s *Store) Bucket(kind bucket.Kind, scope, client string) (Bucket, bool) {
	sh := &s.shards[store.ShardOf(client)]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	e, ok := sh.buckets[key{kind, scope, client}]
	return e, ok && e.Expires > s.clock()
}

// Meta implements store.Store.
func (s *Store) Meta(ctx context.Context, i int) (store.Meta, error) {
	if err := store.ValidateShard(i); err != nil {
		return store.Meta{}, err
	}
	return s.onMeta(ctx, i, func(*shard) {})
}

// Begin implements store.Store.
func (s *Store) Begin(ctx context.Context, i int, stream string, cursor uint64) (store.Meta, error) {
	if err := store.ValidateBegin(i, stream, cursor); err != nil {
		return store.Meta{}, err
	}
	return s.onMeta(ctx, i, func(sh *shard) {
		if sh.meta.Epoch == "" || sh.meta.Stream != stream {
			sh.begin(stream, cursor, s.clock())
		}
	})
}

// Rebase implements store.Store.
func (s *Store) Rebase(ctx context.Context, i int, stream string, from, cursor uint64) (store.Meta, error) {
	if err := store.ValidateBegin(i, stream, max(from, cursor)); err != nil {
		return store.Meta{}, err
	}
	return s.onMeta(ctx, i, func(sh *shard) {
		if sh.meta.Epoch == "" || sh.meta.Stream != stream || sh.meta.Cursor == from {
			sh.begin(stream, cursor, s.clock())
		}
	})
}

func (sh *shard) begin(stream string, cursor uint64, now int64) {
	if sh.meta.Epoch == "" {
		sh.meta.Epoch = strconv.FormatInt(now, 10)
	}
	sh.base += sh.meta.Cursor
	sh.meta.Stream, sh.meta.Cursor = stream, cursor
}

func (s *Store) onMeta(ctx context.Context, i int, change func(*shard)) (store.Meta, error) {
	if ctx.Err() != nil {
		return store.Meta{}, store.ErrUnavailable
	}
	sh := &s.shards[i]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	change(sh)
	return sh.meta, nil
}

// read is the bucket as stored, under k or under its other key, and the key; where there is
// none a full one with gen 0.
func (sh *shard) read(k key, spec bucket.Spec, now int64) (key, Bucket) {
	for _, k := range [...]key{k, k.other()} {
		if e, ok := sh.buckets[k]; ok && e.Expires > now {
			return k, e
		}
	}
	return k, Bucket{State: bucket.Full(spec, now), Spec: spec}
}

// write stores e under k, and nowhere else, as the bucket's next change.
func (sh *shard) write(k key, e *Bucket, spec bucket.Spec, now int64) {
	if e.Gen == 0 {
		e.Gen = now
		sh.sweep(now)
		sh.evict()
	}
	if e.Spec.Kind != spec.Kind {
		delete(sh.buckets, k.other())
	}
	if spec.Kind != bucket.TokenBucket {
		e.Reset = 0
	}
	e.Spec = spec
	e.Seq++
	e.Expires = (min(now+e.State.Lifetime(spec, now), bucket.Latest) + 999) / 1000 * 1000
	sh.buckets[k] = *e
}

// sweep drops a few expired buckets, from a random place. Called for each new bucket, it keeps
// the map within a constant factor of what lives.
func (sh *shard) sweep(now int64) {
	const atOnce = 4
	n := 0
	for k, b := range sh.buckets {
		if n++; n > atOnce {
			return
		}
		if b.Expires <= now {
			delete(sh.buckets, k)
		}
	}
}

// evict makes room for a bucket where there is none.
func (sh *shard) evict() {
	const sample = 8
	if sh.most == 0 || len(sh.buckets) < sh.most {
		return
	}
	var fullest key
	n, soonest := 0, int64(0)
	for k, b := range sh.buckets {
		if n == 0 || b.Expires < soonest {
			fullest, soonest = k, b.Expires
		}
		if n++; n == sample {
			break
		}
	}
	delete(sh.buckets, fullest)
}

// Sweep drops every expired bucket. They are dropped in passing anyway, and never seen.
func (s *Store) Sweep() {
	now := s.clock()
	for i := range s.shards {
		sh := &s.shards[i]
		sh.mu.Lock()
		for k, b := range sh.buckets {
			if b.Expires <= now {
				delete(sh.buckets, k)
			}
		}
		sh.mu.Unlock()
	}
}

package storetest

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"reflect"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// Choices is where a sequence's decisions come from: IntN is in [0, n).
type Choices interface {
	IntN(n int) int
}

// Seeded makes the same choices for the same seed.
func Seeded(seed uint64) Choices { return rand.New(rand.NewPCG(seed, seed)) }

// Bytes takes choices from a fuzzer's bytes; when they run out, all are 0.
type Bytes []byte

// IntN implements Choices.
func (b *Bytes) IntN(n int) int {
	x := 0
	for size := 1; size < n && len(*b) > 0; size <<= 8 {
		x = x<<8 | int((*b)[0])
		*b = (*b)[1:]
	}
	return x % n
}

// Sequence runs a sequence of checks, settlements, changes of limits and moves of the clock, of
// edge values mostly, on all stores together. After every step they must have answered alike and
// stored alike, and an exact model must agree. The first store is the one the model follows.
func Sequence(t testing.TB, choices Choices, steps int, stores ...Clocked) {
	t.Helper()
	s := newSequence(choices, stores)
	for step := range steps {
		if err := s.step(t); err != nil {
			t.Fatalf("step %d: %v\n%s", step, err, s.trace())
		}
	}
}

const (
	routeScope = "r"
	traceSteps = 12
)

type sequence struct {
	Choices
	stores  []Clocked
	model   *model
	now     int64
	shard   int
	clients []string
	limits  []store.Limit
	cursor  uint64
	charged []store.Item   // recent charges, to settle
	granted []store.Return // not yet given back
	seen    []sight        // of token buckets, lately
	wait    int64          // of a limit that refused last, or of the whole answer
	recent  []event
}

// sight is what was seen of a bucket.
type sight struct {
	modelKey
	store.Seen
}

func newSequence(choices Choices, stores []Clocked) *sequence {
	s := &sequence{Choices: choices, stores: stores, now: Epoch}
	s.model = &model{buckets: map[modelKey]*modelBucket{}, last: s.last}
	// Clients of one shard, so that a settlement can name several.
	s.shard = store.ShardOf("client 0")
	for i := 0; len(s.clients) < 3; i++ {
		if c := fmt.Sprintf("client %d", i); store.ShardOf(c) == s.shard {
			s.clients = append(s.clients, c)
		}
	}
	s.limits = make([]store.Limit, 3)
	for i := range s.limits {
		s.redefine(i)
	}
	return s
}

func pick[T any](c Choices, of ...T) T { return of[c.IntN(len(of))] }

// event is what a step did, for the trace of a failure.
type event struct {
	format string
	arg    any
}

func (s *sequence) note(format string, arg any) {
	s.recent = append(s.recent, event{format, arg})
	s.recent = s.recent[max(0, len(s.recent)-traceSteps):]
}

func (s *sequence) trace() string {
	out := "the last steps were:"
	for _, e := range s.recent {
		out += "\n  " + fmt.Sprintf(e.format, e.arg)
	}
	return out
}

// redefine gives the i-th limit new parameters: the route's, the plan's or the day's.
func (s *sequence) redefine(i int) {
	l := bucket.Limit{
		Capacity: pick[int64](s, 1, 2, 5, 20, 1000, 77_777, bucket.MaxTokens),
		Rate: pick[int64](s, 1, 7, 11_574, 100_000, 150_000, 333_333, one, 10*one, 16_666_667, 7_777_777_777,
			bucket.MaxRate/3, bucket.MaxRate),
		Window:  pick[int64](s, 1, 7, 60, 3600, bucket.MaxWindow),
		MaxDebt: pick[int64](s, 0, 1, one, 100*one, bucket.MaxDebt),
		Grace:   i == 0,
	}
	m := pick[int64](s, one, one, 200_000, 333_333, 512_345)
	scope := routeScope
	switch i {
	case 0:
		l.Kind = pick(s, bucket.TokenBucket, bucket.TokenBucket, bucket.SlidingWindow)
	case 1:
		scope, m = bucket.ScopePlan, one
		l.Kind = pick(s, bucket.TokenBucket, bucket.SlidingWindow)
	default:
		scope, m = bucket.ScopeDay, one
		l.Kind = bucket.DailyQuota
	}
	s.limits[i] = store.Limit{Scope: scope, Spec: bucket.Effective(l, m)}
	s.note("limit %+v", s.limits[i])
}

func (s *sequence) step(t testing.TB) error {
	switch s.IntN(40) {
	case 0:
		s.redefine(s.IntN(len(s.limits)))
		return nil
	case 1, 2, 3, 4, 5, 6:
		return s.settle(t)
	case 7, 8:
		return s.giveBack(t)
	case 9:
		return s.adjust(t)
	default:
		if s.IntN(3) > 0 {
			if err := s.move(); err != nil {
				return err
			}
		}
		return s.check(t)
	}
}

// move moves the clock, to a boundary of the last refusal often.
func (s *sequence) move() error {
	by := pick[int64](s, 0, 1, 3, 107, 1_000, 99_999, 333_333, 1_000_000, 10_000_000, 61_000_000, 121_000_000,
		s.wait, s.wait, s.wait-1, 3_600_000_000, 86_400_000_000, -1, -1_000_000, -3_600_000_000)
	if by > 40*86_400_000_000 { // not out of the range of time
		by = 40 * 86_400_000_000
	}
	if s.now+by < Epoch || s.now+by > 2*Epoch {
		by = 0
	}
	s.now += by
	s.note("clock %+d", by)
	for _, st := range s.stores {
		st.SetClock(s.now)
	}
	for _, client := range s.clients {
		ids := s.ids(client)
		stored := s.stores[0].Stored(ids...)
		for _, l := range s.limits {
			if k := (modelKey{client, l.Scope}); find(ids, stored, k) < 0 {
				if err := s.model.expired(k, s.now); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (s *sequence) cost() int64 {
	capacity := s.limits[s.IntN(len(s.limits))].Spec.Capacity
	return min(bucket.MaxMicro, pick[int64](s, 0, 1, 999_999, one, one, one, one+1, 5*one, capacity/2, capacity-1, capacity, capacity+1,
		int64(s.IntN(1<<30)), bucket.MaxMicro))
}

// Batcher is a store that decides checks in turn in one step, each as if it were alone.
type Batcher interface {
	CheckAll(checks []store.Check) ([]store.Decision, error)
}

// check decides one request or some: a Batcher's in one step.
func (s *sequence) check(t testing.TB) error {
	checks := make([]store.Check, pick(s, 1, 1, 1, 2, 5))
	for i := range checks {
		c := store.Check{Client: pick(s, s.clients...), Cost: s.cost(), Shadow: s.IntN(8) == 0}
		for _, i := range pick(s, []int{0}, []int{0, 1, 2}, []int{2, 1}, []int{1, 0}) {
			c.Limits = append(c.Limits, s.limits[i])
		}
		if c.Cost > 0 && !c.Shadow && s.IntN(2) == 0 {
			c.Want = min(pick(s, 1, c.Cost, 10*one, 3*c.Cost+1, bucket.MaxMicro), bucket.MaxMicro)
			c.Share = pick[int64](s, 1, 2, 3, 8)
		}
		if s.IntN(3) == 0 {
			c.Seen = s.remembered(c)
		}
		s.note("check %+v", c)
		checks[i] = c
	}
	batched := make([][]store.Decision, len(s.stores))
	for i, st := range s.stores[1:] {
		if b, ok := st.(Batcher); ok {
			var err error
			if batched[i+1], err = b.CheckAll(checks); err != nil {
				return err
			}
		}
	}
	for i, c := range checks {
		if err := s.decide(t, c, func(t testing.TB, at int) (store.Decision, error) {
			if batched[at] != nil {
				return batched[at][i], nil
			}
			return s.stores[at].Check(t.Context(), c)
		}); err != nil {
			return err
		}
	}
	var ids []ID
	for _, client := range s.clients {
		ids = append(ids, s.ids(client)...)
	}
	_, err := s.same(ids)
	return err
}

// remembered is what an edge may have seen of a check's buckets, which may not be what the store holds.
func (s *sequence) remembered(c store.Check) []store.Seen {
	all := make([]store.Seen, len(c.Limits))
	for i, l := range c.Limits {
		for _, at := range s.seen {
			if l.Spec.Kind != bucket.TokenBucket || at.modelKey != (modelKey{c.Client, l.Scope}) || s.IntN(2) == 0 {
				continue
			}
			all[i] = at.Seen
			all[i].Gen += pick[int64](s, 0, 0, 0, 1, 1_000_000)
			all[i].Seq += pick[int64](s, 0, 0, 1, 100)
			all[i].Tokens = max(-bucket.MaxDebt, min(bucket.MaxMicro, all[i].Tokens-pick[int64](s, 0, 0, 1, one, 100*one)))
		}
	}
	return all
}

// heal judges whether a store went on from what was seen of the i-th limit, and follows it. after follows
// the store in writing that, which a peek does not.
func (s *sequence) heal(c store.Check, i int, d store.Decision, ids []ID, before []Hash) (after func() error, err error) {
	l, seen, k := c.Limits[i], c.Seen[i], modelKey{c.Client, c.Limits[i].Scope}
	was := s.model.buckets[k]
	lost := true
	if at := find(ids, before, k); at >= 0 {
		gen, seq, reset := before[at].int("gen"), before[at].int("seq"), before[at].int("reset")
		lost = ids[at].Kind == l.Spec.Kind && (gen != seen.Gen || seq < seen.Seq) && seen.Time > reset
	}
	slack := int64(1)
	current := fresh(l.Spec, s.now)
	if was != nil && was.spec.Kind == l.Spec.Kind {
		current, slack = was, was.slack+1
	}
	carried := &modelBucket{spec: l.Spec, balance: rat(seen.Tokens), grace: rat(seen.Grace), last: seen.Time}
	mine, _ := carried.refilled(l.Spec, s.now)
	theirs, _ := current.refilled(l.Spec, s.now)
	lower := new(big.Rat).Sub(theirs, mine) // by how much what was seen is lower
	switch healed := d.Limits[i].Healed; {
	case healed && (!lost || lower.Cmp(rat(-slack)) < 0):
		return nil, fmt.Errorf("%v healed to %s, it had %s, lost: %v", k, mine.FloatString(6), theirs.FloatString(6), lost)
	case !healed && lost && lower.Cmp(rat(slack)) > 0:
		return nil, fmt.Errorf("%v did not heal: %s was seen of %s", k, mine.FloatString(6), theirs.FloatString(6))
	case !healed:
		return func() error { return nil }, nil
	}
	s.model.buckets[k] = carried
	return func() error {
		got := d.Limits[i]
		switch {
		case c.Cost == 0:
			if delete(s.model.buckets, k); was != nil {
				s.model.buckets[k] = was
			}
		case got.Charged == 0 && got.GraceCharged == 0:
			return s.model.wrote(k, carried, l.Spec, s.now, got.Remaining)
		}
		return nil
	}, nil
}

// int is a field that is an integer; 0 where there is none.
func (h Hash) int(name string) int64 {
	n, _ := strconv.ParseInt(h.Fields[name], 10, 64)
	return n
}

// decide has all stores decide c, the at-th by decision, and the model judge it.
func (s *sequence) decide(t testing.TB, c store.Check, decision func(t testing.TB, at int) (store.Decision, error)) (err error) {
	var first store.Decision
	ids := s.ids(c.Client)
	before := s.stores[0].Stored(ids...)
	for i := range s.stores {
		d, err := decision(t, i)
		if err != nil {
			return err
		}
		if i == 0 {
			first = d
		} else if !reflect.DeepEqual(d, first) {
			return fmt.Errorf("decisions of store 0 and %d differ:\n%s", i, cmp.Diff(first, d))
		}
	}
	if first.Now != s.now {
		return fmt.Errorf("decided at %d, the clock says %d", first.Now, s.now)
	}
	after := s.stores[0].Stored(ids...)
	s.wait = 0
	switched := false
	for i, l := range c.Limits {
		got := first.Limits[i]
		s.wait = max(s.wait, got.Wait)
		if first.Until > 0 && s.IntN(2) == 0 {
			s.wait = first.Until
		}
		if got.Charged > 0 {
			s.charged = append(s.charged, store.Item{Client: c.Client, Scope: l.Scope, Spec: l.Spec, Window: got.Window, Time: first.Now})
		}
		k := modelKey{c.Client, l.Scope}
		if b := s.model.buckets[k]; b != nil && (b.spec.Kind != l.Spec.Kind || b.spec.Window != l.Spec.Window) {
			switched = true
		}
	}
	s.charged = s.charged[max(0, len(s.charged)-8):]
	for i := range c.Seen {
		if c.Seen[i].Gen == 0 {
			continue
		}
		after, err := s.heal(c, i, first, ids, before)
		if err != nil {
			return err
		}
		defer func() {
			if err == nil {
				err = after()
			}
		}()
	}
	for i, l := range c.Limits {
		if got := first.Limits[i]; l.Spec.Kind == bucket.TokenBucket && got.Gen > 0 {
			s.seen = append(s.seen, sight{modelKey{c.Client, l.Scope}, store.Seen{
				Gen: got.Gen, Seq: got.Seq, Settled: got.Settled, Tokens: got.Remaining, Grace: got.Grace, Time: first.Now}})
		}
	}
	s.seen = s.seen[max(0, len(s.seen)-12):]
	if first.Granted > 0 {
		r := store.Return{Client: c.Client, Amount: first.Granted}
		for i, l := range c.Limits {
			r.Limits = append(r.Limits, store.Returned{Limit: l, Window: first.Limits[i].Window, Gen: first.Limits[i].Gen})
		}
		s.granted = append(s.granted, r)
		s.granted = s.granted[max(0, len(s.granted)-8):]
	}
	if !switched {
		return s.model.check(c, first)
	}
	// A switch is not the model's to judge (TestSwitchNeverRefills does): it goes on from what is stored.
	for i, l := range c.Limits {
		k := modelKey{c.Client, l.Scope}
		at := find(ids, after, k)
		if at < 0 || first.Limits[i].Charged+first.Limits[i].GraceCharged == 0 && c.Cost == 0 {
			continue
		}
		spec := l.Spec
		if ids[at].Kind != spec.Kind {
			continue // a peek, or an uncharged limit that keeps its own
		}
		if b := s.model.buckets[k]; b != nil && first.Limits[i].Charged+first.Limits[i].GraceCharged == 0 &&
			b.spec.Kind == spec.Kind && b.spec.Window == spec.Window {
			continue
		}
		if err := s.model.adopt(k, spec, after[at].Fields); err != nil {
			return err
		}
	}
	return nil
}

// giveBack returns some grant, the whole of it or a part.
func (s *sequence) giveBack(t testing.TB) error {
	if len(s.granted) == 0 {
		return nil
	}
	r := pick(s, s.granted...)
	r.Amount = pick(s, r.Amount, r.Amount, 1, (r.Amount+1)/2)
	s.note("return %+v", r)
	ids := s.ids(r.Client)
	before := s.stores[0].Stored(ids...)
	for _, st := range s.stores {
		if err := st.Return(t.Context(), r); err != nil {
			return err
		}
	}
	after, err := s.same(ids)
	if err != nil {
		return err
	}
	for _, l := range r.Limits {
		k := modelKey{r.Client, l.Scope}
		at := find(ids, before, k)
		if at >= 0 && ids[at].Kind == l.Spec.Kind && before[at].is(l) {
			// As a refund is judged, under what the bucket was last cut and refilled by.
			spec := s.model.buckets[k].spec
			peek := store.Check{Client: r.Client, Limits: []store.Limit{{Scope: l.Scope, Spec: spec}}}
			d, err := s.stores[0].Check(t.Context(), peek)
			if err != nil {
				return err
			}
			it := store.Item{Client: r.Client, Scope: l.Scope, Spec: spec, Delta: -r.Amount, Window: l.Window, Time: s.now}
			if err := s.model.settle(it, store.ItemState{Remaining: d.Limits[0].Remaining}, s.now); err != nil {
				return fmt.Errorf("returned: %w", err)
			}
			if err := s.model.adopt(k, spec, after[at].Fields); err != nil {
				return err
			}
		} else if at >= 0 && !reflect.DeepEqual(before[at], after[at]) {
			return fmt.Errorf("%v took what it was not charged: %v, before %v", k, after[at], before[at])
		} else if now := find(ids, after, k); at < 0 && now >= 0 {
			return fmt.Errorf("%v was made by a return", k)
		}
	}
	return nil
}

// is reports whether the hash is of the bucket that l was charged to, and not cut since.
func (h Hash) is(l store.Returned) bool {
	return h.int("gen") == l.Gen && h.int("window") == l.Spec.Window && h.int("cap") >= l.Spec.Capacity
}

func (s *sequence) settle(t testing.TB) error {
	s.cursor++
	st := store.Settlement{Shard: s.shard, Stream: "s", Prev: s.cursor - 1, Seq: s.cursor, Boot: "b", N: s.cursor}
	named := map[modelKey]bool{}
	for range s.IntN(3) {
		if len(s.charged) == 0 {
			break
		}
		it := pick(s, s.charged...)
		if k := (modelKey{it.Client, it.Scope}); named[k] {
			continue
		} else {
			named[k] = true
		}
		most := it.Spec.Capacity
		it.Delta = pick[int64](s, 0, 1, one, 9*one, most/3, most, 2*most, -1, -one, -most, -bucket.MaxDebt, bucket.MaxDebt)
		it.Time += pick[int64](s, 0, 0, -1_000_000, 3_600_000_000)
		st.Items = append(st.Items, it)
	}
	s.note("settle %+v", st)
	var ids []ID
	for _, it := range st.Items {
		ids = append(ids, s.ids(it.Client)...)
	}
	var first store.Settled
	for i, cl := range s.stores {
		if _, err := cl.Begin(t.Context(), s.shard, "s", 0); err != nil {
			return err
		}
		got, err := cl.Settle(t.Context(), st)
		if err != nil {
			return err
		}
		if i == 0 {
			first = got
		} else if !reflect.DeepEqual(got, first) && (len(got.Items) > 0 || len(first.Items) > 0) {
			return fmt.Errorf("settlements of store 0 and %d differ:\n%s", i, cmp.Diff(first, got))
		}
	}
	if first.Status != store.Applied || len(first.Items) != len(st.Items) {
		return fmt.Errorf("settled: %+v", first)
	}
	after, err := s.same(ids)
	if err != nil {
		return err
	}
	for i, it := range st.Items {
		k := modelKey{it.Client, it.Scope}
		if b := s.model.buckets[k]; b != nil && (b.spec.Kind != it.Spec.Kind || b.spec.Window != it.Spec.Window) {
			if err := s.model.adopt(k, b.spec, after[find(ids, after, k)].Fields); err != nil {
				return err
			}
			continue
		}
		if err := s.model.settle(it, first.Items[i], s.now); err != nil {
			return err
		}
	}
	return nil
}

// adjust resets or grants. It is not the model's to judge (scenarios and the conformance suite do):
// that goes on from what is stored.
func (s *sequence) adjust(t testing.TB) error {
	a := store.Adjustment{Client: pick(s, s.clients...), Limit: pick(s, s.limits...), Reset: s.IntN(2) == 0}
	if !a.Reset {
		a.Grant = pick(s, 1, one, 9*one, a.Limit.Spec.Capacity, bucket.MaxMicro)
	}
	s.note("adjust %+v", a)
	var first store.ItemState
	for i, st := range s.stores {
		got, err := st.Adjust(t.Context(), a)
		if err != nil {
			return err
		}
		if i == 0 {
			first = got
		} else if got != first {
			return fmt.Errorf("adjustments of store 0 and %d differ:\n%s", i, cmp.Diff(first, got))
		}
	}
	ids := s.ids(a.Client)
	after, err := s.same(ids)
	if err != nil {
		return err
	}
	k := modelKey{a.Client, a.Limit.Scope}
	return s.model.adopt(k, a.Limit.Spec, after[find(ids, after, k)].Fields)
}

// ids are all places where a client's buckets may be.
func (s *sequence) ids(client string) []ID {
	return []ID{
		{bucket.TokenBucket, routeScope, client}, {bucket.SlidingWindow, routeScope, client},
		{bucket.TokenBucket, bucket.ScopePlan, client}, {bucket.SlidingWindow, bucket.ScopePlan, client},
		{bucket.DailyQuota, bucket.ScopeDay, client},
	}
}

// same checks that all stores hold the same under ids, each bucket once and nothing unbounded.
func (s *sequence) same(ids []ID) ([]Hash, error) {
	first := s.stores[0].Stored(ids...)
	for i, st := range s.stores[1:] {
		if got := st.Stored(ids...); !reflect.DeepEqual(got, first) {
			return nil, fmt.Errorf("stored by 0 and %d:\n%s", i+1, cmp.Diff(first, got))
		}
	}
	for i, h := range first {
		if len(h.Fields) > 9 {
			return nil, fmt.Errorf("%v has %d fields: %v", ids[i], len(h.Fields), h.Fields)
		}
		if len(h.Fields) > 0 && i+1 < len(ids) && ids[i].Scope == ids[i+1].Scope && len(first[i+1].Fields) > 0 {
			return nil, fmt.Errorf("%v is stored under both algorithms", ids[i])
		}
	}
	return first, nil
}

// find is where k's bucket is stored, -1 if it is not.
func find(ids []ID, hashes []Hash, k modelKey) int {
	for i, id := range ids {
		if id.Client == k.client && id.Scope == k.scope && len(hashes[i].Fields) > 0 {
			return i
		}
	}
	return -1
}

// last is a token bucket's last_updated as stored.
func (s *sequence) last(k modelKey) (int64, error) {
	h := s.stores[0].Stored(ID{bucket.TokenBucket, k.scope, k.client})[0]
	return strconv.ParseInt(h.Fields["last_updated"], 10, 64)
}

package storetest

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
)

// Epoch is time 0 of tests on a set clock: midnight of 2100-01-01 UTC, in Unix microseconds. It lies ahead of
// Redis' own clock, which goes on deciding what has expired.
const Epoch = 4_102_444_800_000_000

// Clocked is an empty store whose clock the test sets, and whose content it can see.
type Clocked interface {
	store.Store
	// SetClock makes it now o'clock, Unix microseconds. What is due to expire by then is gone.
	SetClock(now int64)
	// Stored is what is stored under each id.
	Stored(ids ...ID) []Hash
}

// ID names where a bucket may be stored.
type ID struct {
	Kind          bucket.Kind
	Scope, Client string
}

// Hash is a bucket's hash, field by field as Redis holds it, and when it expires, in Unix
// milliseconds. Fields is empty where there is none.
type Hash struct {
	Fields  map[string]string
	Expires int64
}

// OnMemory is a memstore on a set clock.
func OnMemory(testing.TB) Clocked {
	m := &memory{now: Epoch}
	m.Store = memstore.New(func() int64 { return m.now })
	return m
}

type memory struct {
	*memstore.Store
	now int64
}

func (m *memory) SetClock(now int64) {
	m.now = now
	m.Sweep() // what is due is gone, even if the clock goes back
}

func (m *memory) Stored(ids ...ID) []Hash {
	out := make([]Hash, len(ids))
	for i, id := range ids {
		if b, ok := m.Bucket(id.Kind, id.Scope, id.Client); ok {
			out[i] = Hash{Fields: hashOf(b), Expires: b.Expires / 1000}
		}
	}
	return out
}

// hashOf is the bucket's fields as lua/lib writes them.
func hashOf(b memstore.Bucket) map[string]string {
	integer := func(n int64) string { return strconv.FormatInt(n, 10) }
	fields := map[string]string{
		"gen":     integer(b.Gen),
		"seq":     integer(b.Seq),
		"settled": strconv.FormatUint(b.Settled, 10),
		"cap":     integer(b.Spec.Capacity),
	}
	if b.Spec.Kind == bucket.TokenBucket {
		fields["tokens"] = tokens(b.State.Token.Tokens)
		fields["grace"] = integer(b.State.Token.Grace)
		fields["last_updated"] = integer(b.State.Token.Last)
		fields["rate"] = integer(b.Spec.Rate)
		if b.Reset > 0 {
			fields["reset"] = integer(b.Reset)
		}
		return fields
	}
	if b.Spec.Kind == bucket.SlidingWindow {
		fields["window"] = integer(b.Spec.Window)
	}
	w := b.State.Window
	fields[integer(w.Index)] = fmt.Sprintf("%d:%d", w.Cur.Amount, w.Cur.Grace)
	if w.Prev != (bucket.Count{}) {
		fields[integer(w.Index-1)] = fmt.Sprintf("%d:%d", w.Prev.Amount, w.Prev.Grace)
	}
	return fields
}

// tokens is micro-tokens as a decimal number of tokens.
func tokens(micro int64) string {
	sign := ""
	if micro < 0 {
		sign, micro = "-", -micro
	}
	return fmt.Sprintf("%s%d.%06d", sign, micro/one, micro%one)
}

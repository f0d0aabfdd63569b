package redisstore

import (
	"fmt"
	"strconv"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// appendSpec writes a spec as lib/bucket.lua reads it.
func appendSpec(args []any, s bucket.Spec) []any {
	return append(args, string(s.Kind), s.Capacity, s.Rate, s.SlowestRate, s.Window, s.Grace, s.MaxDebt)
}

// checkCall is the keys and arguments of check.lua.
func checkCall(c store.Check) (keys []string, args []any) {
	keys = make([]string, 0, 2*len(c.Limits))
	args = make([]any, 2, 2+7*len(c.Limits))
	args[0], args[1] = c.Cost, 0
	if c.Shadow {
		args[1] = 1
	}
	for _, l := range c.Limits {
		keys = appendBucketKeys(keys, l.Spec.Kind, l.Scope, c.Client)
		args = appendSpec(args, l.Spec)
	}
	return keys, args
}

// settleCall is the keys and arguments of settle.lua.
func settleCall(s store.Settlement) (keys []string, args []any) {
	keys = make([]string, 1, 1+2*len(s.Items))
	keys[0] = metaKey(s.Shard)
	args = make([]any, 0, 6+10*len(s.Items))
	args = append(args, s.Stream, s.Prev, s.Seq, s.Boot, s.N, s.Oldest)
	for _, it := range s.Items {
		keys = appendBucketKeys(keys, it.Spec.Kind, it.Scope, it.Client)
		args = append(appendSpec(args, it.Spec), it.Delta, it.Window, it.Time)
	}
	return keys, args
}

// answer reads a script's reply in order. The first thing that is not what it should be sticks.
type answer struct {
	reply []any
	err   error
}

// next is the next value, nil where there is none.
func (a *answer) next() any {
	if a.err == nil && len(a.reply) == 0 {
		a.err = fmt.Errorf("%w: the script's answer is too short", store.ErrState)
	}
	if a.err != nil {
		return nil
	}
	v := a.reply[0]
	a.reply = a.reply[1:]
	return v
}

func (a *answer) fail(v any, want string) {
	if a.err == nil {
		a.err = fmt.Errorf("%w: the script answered %v (%T), want %s", store.ErrState, v, v, want)
	}
}

func (a *answer) text() string {
	v := a.next()
	s, ok := v.(string)
	if !ok {
		a.fail(v, "a string")
	}
	return s
}

// int is an integer; what is read from a hash as it stands comes as text.
func (a *answer) int() int64 {
	switch v := a.next().(type) {
	case int64:
		return v
	case string:
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			a.fail(v, "an integer")
		}
		return n
	default:
		a.fail(v, "an integer")
		return 0
	}
}

func (a *answer) seq() uint64 { return uint64(max(0, a.int())) }

// done reports what went wrong, or that something is left over.
func (a *answer) done() error {
	if a.err == nil && len(a.reply) > 0 {
		return fmt.Errorf("%w: the script's answer has %d values too many", store.ErrState, len(a.reply))
	}
	return a.err
}

func decodeDecision(reply []any, limits int) (store.Decision, error) {
	a := answer{reply: reply}
	d := store.Decision{
		Tier:   bucket.Tier(a.int()),
		Now:    a.int(),
		Limits: make([]store.LimitState, limits),
	}
	for i := range d.Limits {
		d.Limits[i] = store.LimitState{
			Tier:         bucket.Tier(a.int()),
			Remaining:    a.int(),
			Grace:        a.int(),
			Wait:         a.int(),
			Reset:        a.int(),
			Charged:      a.int(),
			GraceCharged: a.int(),
			Window:       a.int(),
			Gen:          a.int(),
			Seq:          a.int(),
			Settled:      a.seq(),
		}
	}
	return d, a.done()
}

func decodeSettled(reply []any, items int) (store.Settled, error) {
	a := answer{reply: reply}
	s := store.Settled{Status: store.SettleStatus(a.text()), Cursor: a.seq()}
	if s.Status == store.Applied && items > 0 {
		s.Items = make([]store.ItemState, items)
		for i := range s.Items {
			s.Items[i] = store.ItemState{Remaining: a.int(), Forgiven: a.int(), Gen: a.int(), Seq: a.int()}
		}
	}
	return s, a.done()
}

func decodeMeta(reply []any) (store.Meta, error) {
	a := answer{reply: reply}
	m := store.Meta{Epoch: a.text(), Stream: a.text(), Cursor: a.seq()}
	return m, a.done()
}

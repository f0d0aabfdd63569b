package redisstore

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// appendSpec writes a spec as lib/bucket.lua reads it.
func appendSpec(args []any, s bucket.Spec) []any {
	return append(args, string(s.Kind), s.Capacity, s.Rate, s.SlowestRate, s.Window, s.Grace, s.MaxDebt)
}

// checkCall is the run of check.lua that decides asks. A spec is sent once, however many share it.
func (s *Store) checkCall(asks []*ask) *call {
	var (
		specs  []any
		places = map[bucket.Spec]int{}
		keys   = make([]string, 0, 2*len(asks))
		rest   = make([]any, 0, 4*len(asks))
	)
	for _, a := range asks {
		rest = append(rest, a.check.Cost)
		switch {
		case a.check.Shadow:
			rest = append(rest, 1)
		case a.check.Want > 0:
			rest = append(rest, 2, a.check.Want, a.check.Share)
		default:
			rest = append(rest, 0)
		}
		rest = append(rest, len(a.check.Limits))
		for i, l := range a.check.Limits {
			keys = appendBucketKeys(keys, l.Spec.Kind, l.Scope, a.check.Client)
			place, ok := places[l.Spec]
			if !ok {
				place = len(places) + 1
				places[l.Spec] = place
				specs = appendSpec(specs, l.Spec)
			}
			if i < len(a.check.Seen) && a.check.Seen[i].Gen > 0 {
				s := a.check.Seen[i]
				rest = append(rest, -place, s.Gen, s.Seq, s.Tokens, s.Grace, s.Time, s.Settled)
			} else {
				rest = append(rest, place)
			}
		}
	}
	args := append(make([]any, 0, 1+len(specs)+len(rest)), len(places))
	return &call{script: s.check, keys: keys, args: append(append(args, specs...), rest...)}
}

// returnCall is the keys and arguments of return.lua.
func returnCall(r store.Return) (keys []string, args []any) {
	args = append(args, r.Amount)
	for _, l := range r.Limits {
		keys = appendBucketKeys(keys, l.Spec.Kind, l.Scope, r.Client)
		args = append(appendSpec(args, l.Spec), l.Window, l.Gen)
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

// adjustCall is the keys and arguments of adjust.lua.
func adjustCall(a store.Adjustment) (keys []string, args []any) {
	op := "grant"
	if a.Reset {
		op = "reset"
	}
	keys = appendBucketKeys(nil, a.Limit.Spec.Kind, a.Limit.Scope, a.Client)
	return keys, appendSpec([]any{op, a.Grant}, a.Limit.Spec)
}

func decodeAdjusted(reply []any) (store.ItemState, error) {
	a := answer{reply: reply}
	s := store.ItemState{Remaining: a.int(), Gen: a.int(), Seq: a.int()}
	return s, a.done()
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

// decodeDecisions sets the outcome of asks by what check.lua answered.
func decodeDecisions(c *call, asks []*ask) {
	now := int64(0)
	if c.err == nil {
		a := answer{reply: c.reply}
		now, c.err = a.int(), a.err
		if c.err == nil && len(a.reply) != len(asks) {
			c.err = fmt.Errorf("%w: the script answered %d requests, want %d", store.ErrState, len(a.reply), len(asks))
		}
	}
	for i, a := range asks {
		if a.err = c.err; a.err != nil {
			continue
		}
		switch reply := c.reply[1+i].(type) {
		case string:
			a.err = refused(reply, errors.New(reply))
		case []any:
			a.decision, a.err = decodeDecision(reply, now, len(a.check.Limits))
		default:
			a.err = fmt.Errorf("%w: the script answered %v (%T), want a list", store.ErrState, reply, reply)
		}
	}
}

func decodeDecision(reply []any, now int64, limits int) (store.Decision, error) {
	a := answer{reply: reply}
	d := store.Decision{
		Tier:    bucket.Tier(a.int()),
		Now:     now,
		Granted: a.int(),
		Until:   a.int(),
		Limits:  make([]store.LimitState, limits),
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
			Healed:       a.int() == 1,
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

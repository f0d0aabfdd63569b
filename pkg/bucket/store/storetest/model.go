package storetest

import (
	"fmt"
	"math/big"
	"strconv"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// model judges decisions and settlements by exact rational arithmetic, written from the
// requirements with nothing in common with the stores. Stores round a balance down where they
// write it; the model keeps the exact one and counts by how much they may differ. It takes one
// thing from the store: the moment, at or before the write, that a written balance stands for.
type model struct {
	buckets map[modelKey]*modelBucket
	// last is last_updated as stored.
	last func(modelKey) (int64, error)
}

type modelKey struct{ client, scope string }

type modelBucket struct {
	// spec is the one it was last written under.
	spec bucket.Spec

	// Of a token bucket: balance and grace in micro-tokens at time last. slack counts the writes
	// since the store's balance was exact, each of which may have cost it less than a micro-token.
	balance, grace    *big.Rat
	slack, graceSlack int64
	last              int64

	// Of windows: what was charged, by index.
	counts map[int64]bucket.Count
}

func rat(n int64) *big.Rat { return new(big.Rat).SetInt64(n) }

func ratMin(a, b *big.Rat) *big.Rat {
	if a.Cmp(b) < 0 {
		return a
	}
	return b
}

// floorRat is the greatest integer at most x.
func floorRat(x *big.Rat) int64 {
	return new(big.Int).Div(x.Num(), x.Denom()).Int64() // Euclidean: floors, the denominator being positive
}

func length(s bucket.Spec) int64 {
	if s.Kind == bucket.DailyQuota {
		return 86_400_000_000
	}
	return s.Window * 1_000_000
}

// fresh is a bucket that is full at now.
func fresh(s bucket.Spec, now int64) *modelBucket {
	return &modelBucket{spec: s, balance: rat(s.Capacity), grace: rat(s.Grace), last: now, counts: map[int64]bucket.Count{}}
}

// refilled is the balance and grace under s at now.
func (b *modelBucket) refilled(s bucket.Spec, now int64) (balance, grace *big.Rat) {
	balance, grace = ratMin(b.balance, rat(s.Capacity)), ratMin(b.grace, rat(s.Grace))
	if now <= b.last {
		return balance, grace
	}
	gain := new(big.Rat).Mul(rat(now-b.last), big.NewRat(s.Rate, 1_000_000))
	balance = ratMin(rat(s.Capacity), new(big.Rat).Add(balance, gain))
	grace = ratMin(rat(s.Grace), new(big.Rat).Add(grace, gain.Quo(gain, rat(5))))
	return balance, grace
}

// wrote follows the store in writing the bucket at now, before the charge: from here on it
// knows the balance at a moment of its choice. before is its balance then.
func (m *model) wrote(k modelKey, b *modelBucket, s bucket.Spec, now, before int64) error {
	last, err := m.last(k)
	if err != nil {
		return err
	}
	if most := max(now, b.last); last > most || last < b.last || last < most-1_000_000/s.Rate {
		return fmt.Errorf("%v: written at %d, last updated %d, before that %d", k, now, last, b.last)
	}
	b.balance, b.grace = b.refilled(s, last)
	b.last = last
	b.slack++
	b.graceSlack++
	if before == s.Capacity {
		b.slack = 0
	}
	return nil
}

// used is N and the grace that is used, of windows, at now: floored to whole tokens for a sliding window.
func (b *modelBucket) used(s bucket.Spec, now int64) (used, grace int64, index int64) {
	index = now / length(s)
	for i := range b.counts {
		index = max(index, i) // time stands at the start of the newest window
	}
	cur, prev := b.counts[index], b.counts[index-1]
	if s.Kind == bucket.DailyQuota {
		return cur.Amount, cur.Grace, index
	}
	left := big.NewRat(length(s)-max(0, now-index*length(s)), length(s))
	whole := func(prev, cur int64) int64 {
		n := new(big.Rat).Mul(rat(prev), left)
		n.Add(n, rat(cur))
		return floorRat(n.Quo(n, rat(one))) * one
	}
	return whole(prev.Amount, cur.Amount), whole(prev.Grace, cur.Grace), index
}

// expired judges that a bucket which is gone weighs nothing any more.
func (m *model) expired(k modelKey, now int64) error {
	b := m.buckets[k]
	if b == nil {
		return nil
	}
	delete(m.buckets, k)
	if b.spec.Kind == bucket.TokenBucket {
		slowest := b.spec
		slowest.Rate = b.spec.SlowestRate
		balance, grace := b.refilled(slowest, now)
		if balance.Cmp(rat(b.spec.Capacity)) < 0 || grace.Cmp(rat(b.spec.Grace)) < 0 {
			return fmt.Errorf("%v expired at %s of %d", k, balance.FloatString(6), b.spec.Capacity)
		}
		return nil
	}
	for i, c := range b.counts {
		if c != (bucket.Count{}) && now < (i+2)*length(b.spec) {
			return fmt.Errorf("%v expired while window %d counts", k, i)
		}
	}
	return nil
}

// check judges one decision and keeps what it charged.
func (m *model) check(c store.Check, d store.Decision) error {
	tier := bucket.Green
	type limit struct {
		b                 *modelBucket
		balance, grace    *big.Rat // exact, before
		index             int64
		before, graceLeft int64 // the store's own, before
		tier              bucket.Tier
	}
	limits := make([]limit, len(c.Limits))
	for i, l := range c.Limits {
		x, got := &limits[i], d.Limits[i]
		x.b = m.buckets[modelKey{c.Client, l.Scope}]
		if x.b == nil {
			x.b = fresh(l.Spec, d.Now)
		}
		// What the store had before it charged must be what there was.
		x.before, x.graceLeft = got.Remaining+got.Charged, got.Grace+got.GraceCharged
		if l.Spec.Kind == bucket.TokenBucket {
			x.balance, x.grace = x.b.refilled(l.Spec, d.Now)
			if err := within("balance", x.before, x.balance, x.b.slack); err != nil {
				return fmt.Errorf("%s: %w", l.Scope, err)
			}
			if err := within("grace", x.graceLeft, x.grace, x.b.graceSlack); err != nil {
				return fmt.Errorf("%s: %w", l.Scope, err)
			}
		} else {
			used, graceUsed, index := x.b.used(l.Spec, d.Now)
			x.index = index
			afterUsed, afterGrace := used, graceUsed
			if got.Charged > 0 || got.GraceCharged > 0 {
				probe := fresh(l.Spec, d.Now)
				for i, n := range x.b.counts {
					probe.counts[i] = n
				}
				n := probe.counts[index]
				probe.counts[index] = bucket.Count{Amount: n.Amount + got.Charged, Grace: n.Grace + got.GraceCharged}
				afterUsed, afterGrace, _ = probe.used(l.Spec, d.Now)
			}
			x.before, x.graceLeft = l.Spec.Capacity-used, max(0, l.Spec.Grace-graceUsed)
			if want := l.Spec.Capacity - afterUsed; got.Remaining != want {
				return fmt.Errorf("%s: remaining %d, want %d", l.Scope, got.Remaining, want)
			}
			if want := max(0, l.Spec.Grace-afterGrace); got.Grace != want {
				return fmt.Errorf("%s: grace %d, want %d", l.Scope, got.Grace, want)
			}
			if got.Window != index {
				return fmt.Errorf("%s: window %d, want %d", l.Scope, got.Window, index)
			}
		}
		x.tier = bucket.Red
		if x.before >= c.Cost {
			x.tier = bucket.Green
		} else if l.Spec.Grace > 0 && x.before >= 0 && x.before+x.graceLeft >= c.Cost {
			x.tier = bucket.Yellow
		}
		if got.Tier != x.tier {
			return fmt.Errorf("%s: %s, want %s of %d and %d", l.Scope, got.Tier, x.tier, x.before, x.graceLeft)
		}
		tier = max(tier, x.tier)
	}
	if d.Tier != tier {
		return fmt.Errorf("%s, want %s", d.Tier, tier)
	}
	granted := c.Want
	for i := range limits {
		if c.Want > 0 {
			granted = max(0, min(granted, (limits[i].before-c.Cost)/c.Share))
		}
	}
	if tier != bucket.Green {
		granted = 0
	}
	if granted > 0 {
		granted = granted / c.Cost * c.Cost
	}
	if d.Granted != granted {
		return fmt.Errorf("granted %d, want %d", d.Granted, granted)
	}
	for i, l := range c.Limits {
		x, got := &limits[i], d.Limits[i]
		var charged, grace int64
		switch {
		case tier == bucket.Green:
			charged = c.Cost + granted
		case tier == bucket.Yellow && x.tier == bucket.Yellow:
			grace = min(x.graceLeft, c.Cost)
			charged = c.Cost - grace
		case c.Shadow:
			charged = min(c.Cost, max(0, x.before))
		}
		if got.Charged != charged || got.GraceCharged != grace {
			return fmt.Errorf("%s: charged %d and %d of grace, want %d and %d", l.Scope, got.Charged, got.GraceCharged, charged, grace)
		}
		if charged == 0 && grace == 0 {
			continue
		}
		b, k := x.b, modelKey{c.Client, l.Scope}
		m.buckets[k] = b
		b.spec = l.Spec
		if l.Spec.Kind != bucket.TokenBucket {
			n := b.counts[x.index]
			b.counts[x.index] = bucket.Count{Amount: n.Amount + charged, Grace: n.Grace + grace}
			continue
		}
		if err := m.wrote(k, b, l.Spec, d.Now, x.before); err != nil {
			return err
		}
		b.balance = new(big.Rat).Sub(b.balance, rat(charged))
		b.grace = new(big.Rat).Sub(b.grace, rat(grace))
	}
	return nil
}

// within judges that got is want rounded down, less what slack writes may have cost.
func within(what string, got int64, want *big.Rat, slack int64) error {
	high := floorRat(want)
	if got > high || got < high-slack-1 {
		return fmt.Errorf("%s %d, want %s, at most %d less", what, got, want.FloatString(6), slack+1)
	}
	return nil
}

// settle judges one item that was applied and keeps what it moved.
func (m *model) settle(it store.Item, got store.ItemState, now int64) error {
	k := modelKey{it.Client, it.Scope}
	b := m.buckets[k]
	if it.Spec.Kind != bucket.TokenBucket {
		return m.settleWindow(k, it, got, now)
	}
	absent := b == nil
	if absent { // full when it was charged
		b = fresh(it.Spec, min(it.Time, now))
		m.buckets[k] = b
	} else if err := m.wrote(k, b, it.Spec, now, 0); err != nil {
		return err
	}
	b.spec = it.Spec
	var forgiven int64
	if it.Delta <= 0 {
		b.balance = ratMin(new(big.Rat).Sub(b.balance, rat(it.Delta)), rat(it.Spec.Capacity))
	} else {
		floor := ratMin(b.balance, rat(-it.Spec.MaxDebt))
		if after := new(big.Rat).Sub(b.balance, rat(it.Delta)); after.Cmp(floor) < 0 {
			forgiven = floorRat(new(big.Rat).Sub(floor, after))
		}
		b.balance = new(big.Rat).Sub(b.balance, rat(it.Delta-got.Forgiven))
	}
	if got.Forgiven < forgiven-1 || got.Forgiven > forgiven+b.slack+1 {
		return fmt.Errorf("%s: forgave %d, want %d", it.Scope, got.Forgiven, forgiven)
	}
	if absent {
		if err := m.wrote(k, b, it.Spec, now, 0); err != nil {
			return err
		}
	}
	balance, _ := b.refilled(it.Spec, now)
	return within(it.Scope, got.Remaining, balance, b.slack)
}

func (m *model) settleWindow(k modelKey, it store.Item, got store.ItemState, now int64) error {
	b := m.buckets[k]
	at := now
	if b == nil { // nothing was charged when this was
		at = min(it.Time, now)
		b = fresh(it.Spec, at)
		m.buckets[k] = b
	}
	_, _, index := b.used(it.Spec, at)
	b.spec = it.Spec
	var forgiven int64
	if window := min(it.Window, index); window >= index-1 {
		n := b.counts[window]
		n.Amount += it.Delta
		most := it.Spec.Capacity + it.Spec.MaxDebt
		if it.Delta > 0 && n.Amount > most {
			forgiven = min(it.Delta, n.Amount-most)
			n.Amount -= forgiven
		}
		n.Amount = max(0, n.Amount)
		b.counts[window] = n
	}
	if got.Forgiven != forgiven {
		return fmt.Errorf("%s: forgave %d, want %d", it.Scope, got.Forgiven, forgiven)
	}
	used, _, newest := b.used(it.Spec, now)
	if _, seen := b.counts[newest]; !seen {
		b.counts[newest] = bucket.Count{} // the store has seen this window now, and will not go back behind it
	}
	if want := it.Spec.Capacity - used; got.Remaining != want {
		return fmt.Errorf("%s: remaining %d, want %d", it.Scope, got.Remaining, want)
	}
	return nil
}

// adopt takes over a bucket as it is stored, after a switch.
func (m *model) adopt(k modelKey, s bucket.Spec, fields map[string]string) error {
	b := fresh(s, 0)
	m.buckets[k] = b
	for name, text := range fields {
		switch index, err := strconv.ParseInt(name, 10, 64); {
		case err == nil:
			var c bucket.Count
			if _, err := fmt.Sscanf(text, "%d:%d", &c.Amount, &c.Grace); err != nil {
				return err
			}
			b.counts[index] = c
		case name == "tokens":
			micro, err := micro(text)
			if err != nil {
				return err
			}
			b.balance = rat(micro)
		case name == "grace", name == "last_updated":
			n, err := strconv.ParseInt(text, 10, 64)
			if err != nil {
				return err
			}
			if name == "grace" {
				b.grace = rat(n)
			} else {
				b.last = n
			}
		}
	}
	return nil
}

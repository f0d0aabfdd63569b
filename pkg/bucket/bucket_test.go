package bucket

import (
	"math/big"
	"testing"

	"pgregory.net/rapid"
)

// now is about when these tests were written.
const now = 1_800_000_000_000_000

func drawMicro(t *rapid.T, name string, low, high int64) int64 {
	return rapid.OneOf(
		rapid.Int64Range(low, high),
		rapid.Int64Range(low, min(high, low+3*One)),
		rapid.Map(rapid.Int64Range(0, 100), func(n int64) int64 { return min(high, max(low, n*One)) }),
	).Draw(t, name)
}

func drawSpec(t *rapid.T, name string, kinds ...Kind) Spec {
	l := Limit{
		Kind:     rapid.SampledFrom(kinds).Draw(t, name+" kind"),
		Capacity: rapid.OneOf(rapid.Int64Range(1, 30), rapid.Int64Range(1, MaxTokens)).Draw(t, name+" capacity"),
		Rate:     rapid.OneOf(rapid.Int64Range(1, 3*One), rapid.Int64Range(1, MaxRate)).Draw(t, name+" rate"),
		Window:   rapid.OneOf(rapid.Int64Range(1, 120), rapid.Int64Range(1, MaxWindow)).Draw(t, name+" window"),
		Grace:    rapid.Bool().Draw(t, name+" grace"),
	}
	if err := l.Validate(); err != nil {
		t.Fatal(err)
	}
	s := Effective(l, rapid.Int64Range(FloorMultiplier, One).Draw(t, name+" multiplier"))
	if err := s.Validate(); err != nil {
		t.Fatalf("%+v: %v", s, err)
	}
	return s
}

// drawState is any state that the spec may have left.
func drawState(t *rapid.T, s Spec) State {
	st := Full(s, now-rapid.Int64Range(0, 3_000*second).Draw(t, "age"))
	if s.Kind == TokenBucket {
		st.Token.Tokens = drawMicro(t, "tokens", -s.MaxDebt, s.Capacity)
		st.Token.Grace = drawMicro(t, "grace", 0, s.Grace)
		return st
	}
	st.Window.Cur.Amount = drawMicro(t, "cur", 0, s.Capacity+s.MaxDebt)
	st.Window.Prev.Amount = drawMicro(t, "prev", 0, s.Capacity+s.MaxDebt)
	st.Window.Cur.Grace = drawMicro(t, "cur grace", 0, s.Grace)
	return st
}

// Wait is the first microsecond at which the cost is green, Reset the first at which nothing is used.
func TestWaitIsExact(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := drawSpec(t, "limit", TokenBucket, SlidingWindow, DailyQuota)
		st := drawState(t, s)
		target := drawMicro(t, "target", 0, s.Capacity)
		wait := st.Until(s, target, now)
		reached := func(at int64) bool {
			balance, _ := st.At(s, at).Balance(s, at)
			return balance >= target
		}
		switch {
		case wait < 0 || wait > MaxWait:
			t.Fatalf("wait %d", wait)
		case wait == MaxWait: // longer than we can say
		case !reached(now + wait):
			t.Fatalf("not there after %d", wait)
		case wait > 0 && reached(now+wait-1):
			t.Fatalf("there before %d", wait)
		}
		if st.Until(s, s.Capacity+1, now) != Never {
			t.Fatal("more than the capacity can be waited for")
		}
	})
}

// However often a bucket is written, by charges of a micro-token, it loses less than a
// micro-token and less than a microsecond of refill each time.
func TestRefillLosesNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := Spec{Kind: TokenBucket, Capacity: MaxMicro, Rate: rapid.OneOf(rapid.Int64Range(1, 3*One), rapid.Int64Range(1, MaxRate)).Draw(t, "rate")}
		tok := Token{Last: now}
		at, writes := int64(now), int64(0)
		for range rapid.IntRange(1, 200).Draw(t, "writes") {
			at += rapid.Int64Range(0, 5_000).Draw(t, "gap")
			tok = tok.at(s, at)
			if tok.Last > at || at-tok.Last > second/s.Rate {
				t.Fatalf("last %d at %d", tok.Last, at)
			}
			writes++
		}
		exact := new(big.Rat).Mul(big.NewRat(at-now, second), new(big.Rat).SetInt64(s.Rate))
		stored := new(big.Rat).Add(new(big.Rat).SetInt64(tok.Tokens), big.NewRat((at-tok.Last)*s.Rate, second))
		lost := exact.Sub(exact, stored)
		most := new(big.Rat).SetInt64(writes)
		if perTick := new(big.Rat).Mul(big.NewRat(s.Rate, second), most); perTick.Cmp(most) < 0 {
			most = perTick
		}
		if tok.Tokens < s.Capacity && (lost.Sign() < 0 || lost.Cmp(most) > 0) {
			t.Fatalf("%d writes lost %s micro-tokens, at most %s", writes, lost.FloatString(9), most.FloatString(9))
		}
	})
}

// A switch to another algorithm or window and back never leaves more than there was.
func TestSwitchNeverRefills(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a := drawSpec(t, "a", TokenBucket, SlidingWindow)
		b := drawSpec(t, "b", TokenBucket, SlidingWindow)
		st := drawState(t, a).At(a, now)
		if a.Kind == b.Kind && a.Window == b.Window {
			if st.As(a, b, now) != st {
				t.Fatal("another capacity is no switch")
			}
			return
		}
		before, graceBefore := st.Balance(a, now)
		there := st.As(a, b, now)
		if there.Kind != b.Kind {
			t.Fatalf("kind %q", there.Kind)
		}
		balance, grace := there.Balance(b, now)
		// Share by share, rounded down: what is left of b is no more than was left of a. A
		// window's room is rounded up to whole tokens, which a switch must not make use of. Of grace
		// not even what b shows may be more: a yellow answer spends it, and owes nothing.
		if a.Kind == SlidingWindow {
			used, spent := st.Window.used(a.Window*second, now)
			before, graceBefore = a.Capacity-used, max(0, a.Grace-spent)
		}
		if b.Kind == SlidingWindow {
			used, _ := there.Window.used(b.Window*second, now)
			balance = b.Capacity - used
		}
		left := new(big.Rat).SetFrac64(before, a.Capacity)
		if got := new(big.Rat).SetFrac64(balance, b.Capacity); got.Cmp(left) > 0 && balance > -b.MaxDebt {
			t.Fatalf("%d of %d became %d of %d", before, a.Capacity, balance, b.Capacity)
		}
		if before == a.Capacity && balance != b.Capacity {
			t.Fatalf("a full bucket became %d of %d", balance, b.Capacity)
		}
		if (a.Kind == TokenBucket || a.Grace == b.Grace) && grace > graceBefore {
			t.Fatalf("grace %d became %d", graceBefore, grace)
		}
	})
}

// Settling in parts is settling the sum, where no bound is met.
func TestSettlementsAddUp(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := drawSpec(t, "limit", TokenBucket, SlidingWindow, DailyQuota)
		st := drawState(t, s).At(s, now)
		delta := rapid.Int64Range(0, s.Capacity).Draw(t, "delta")
		part := rapid.Int64Range(0, delta).Draw(t, "part")
		whole, forgiven := st.Settle(s, delta, st.WindowIndex())
		first, f1 := st.Settle(s, part, st.WindowIndex())
		second, f2 := first.Settle(s, delta-part, st.WindowIndex())
		if whole != second || forgiven != f1+f2 {
			t.Fatalf("%+v forgiving %d, in parts %+v forgiving %d and %d", whole, forgiven, second, f1, f2)
		}
		back, f := whole.Settle(s, forgiven-delta, st.WindowIndex())
		if back != st || f != 0 {
			t.Fatalf("given back: %+v, was %+v", back, st)
		}
	})
}

func TestEffective(t *testing.T) {
	t.Parallel()
	bucket := func(capacity, rate int64) Limit {
		return Limit{Kind: TokenBucket, Capacity: capacity, Rate: rate, Grace: true}
	}
	spec := func(capacity, rate, slowest, grace, debt int64) Spec {
		return Spec{Kind: TokenBucket, Capacity: capacity * One, Rate: rate, SlowestRate: slowest, Grace: grace * One, MaxDebt: debt * One}
	}
	for name, tc := range map[string]struct {
		limit Limit
		m     int64
		want  Spec
	}{
		"as configured":                 {bucket(20, 10*One), One, spec(20, 10*One, 2*One, 4, 200)},
		"half":                          {bucket(20, 10*One), One / 2, spec(10, 5*One, 2*One, 4, 200)},
		"rounded down":                  {bucket(7, 3), 333_333, spec(2, 3, 3, 1, 70)},
		"at least one token":            {bucket(3, One), 200_000, spec(1, 200_000, 200_000, 0, 30)},
		"a slow rate is not slowed":     {bucket(5, 11_574), 200_000, spec(1, 11_574, 11_574, 1, 50)},
		"nor below a tenth":             {bucket(5, 300_000), 200_000, spec(1, 100_000, 100_000, 1, 50)},
		"multiplier below the floor":    {bucket(20, 10*One), 0, spec(4, 2*One, 2*One, 4, 200)},
		"multiplier above one":          {bucket(20, 10*One), 5 * One, spec(20, 10*One, 2*One, 4, 200)},
		"the greatest":                  {bucket(MaxTokens, MaxRate), One, spec(MaxTokens, MaxRate, MaxRate/5, MaxTokens/5, 10*MaxTokens)},
		"debt as given, no grace":       {Limit{Kind: TokenBucket, Capacity: 20, Rate: One, MaxDebt: 3}, One, Spec{Kind: TokenBucket, Capacity: 20 * One, Rate: One, SlowestRate: 200_000, MaxDebt: 3}},
		"sliding window":                {Limit{Kind: SlidingWindow, Capacity: 100, Window: 60, Grace: true}, 250_000, Spec{Kind: SlidingWindow, Capacity: 25 * One, Window: 60, Grace: 20 * One, MaxDebt: 1000 * One}},
		"a daily quota has no rate":     {Limit{Kind: DailyQuota, Capacity: 10_000, Rate: 5}, One, Spec{Kind: DailyQuota, Capacity: 10_000 * One, MaxDebt: 100_000 * One}},
		"a bucket's window is not kept": {Limit{Kind: TokenBucket, Capacity: 1, Rate: One, Window: 9}, One, Spec{Kind: TokenBucket, Capacity: One, Rate: One, SlowestRate: 200_000, MaxDebt: 10 * One}},
	} {
		got := Effective(tc.limit, tc.m)
		if got != tc.want {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
		if err := got.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Case 5, where limits are made: zero and below are refused, not taken as unlimited.
func TestValidate(t *testing.T) {
	t.Parallel()
	for name, l := range map[string]Limit{
		"no capacity":       {Kind: TokenBucket, Rate: One},
		"negative capacity": {Kind: DailyQuota, Capacity: -1},
		"huge capacity":     {Kind: DailyQuota, Capacity: MaxTokens + 1},
		"no rate":           {Kind: TokenBucket, Capacity: 1},
		"huge rate":         {Kind: TokenBucket, Capacity: 1, Rate: MaxRate + 1},
		"no window":         {Kind: SlidingWindow, Capacity: 1},
		"long window":       {Kind: SlidingWindow, Capacity: 1, Window: MaxWindow + 1},
		"negative debt":     {Kind: DailyQuota, Capacity: 1, MaxDebt: -1},
		"huge debt":         {Kind: DailyQuota, Capacity: 1, MaxDebt: MaxDebt + 1},
		"no kind":           {Capacity: 1},
	} {
		if l.Validate() == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

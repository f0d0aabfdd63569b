package settler

import (
	"fmt"
	"math/big"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
)

const one = bucket.One

func TestRealCost(t *testing.T) {
	t.Parallel()
	ok := events.Response{Base: one, MaxCost: 1000 * one, Outcome: events.OutcomeOK, Status: 200, Duration: 2_500_000}
	with := func(change func(*events.Response)) events.Response {
		e := ok
		change(&e)
		return e
	}
	header := func(v string) events.Response { return with(func(e *events.Response) { e.ComputeCost = v }) }
	priced := func(rate int64) events.Response { return with(func(e *events.Response) { e.LatencyRate = rate }) }
	for _, c := range []struct {
		name  string
		event events.Response
		cost  int64
		by    basis
		why   flaw
	}{
		{"no header keeps the base", ok, one, byBase, flawNone},
		{"whole", header("10"), 10 * one, byHeader, flawNone},
		{"zero", header("0"), 0, byHeader, flawNone},
		{"six places", header("0.000001"), 1, byHeader, flawNone},
		{"fraction", header("12.5"), 12_500_000, byHeader, flawNone},
		{"leading zeros", header("000000007"), 7 * one, byHeader, flawNone},
		{"exactly the maximum", header("1000"), 1000 * one, byHeader, flawNone},
		{"above the maximum", header("1000.000001"), one, byBase, flawAboveMax},
		{"most digits", header("999999999.999999"), one, byBase, flawAboveMax},
		{"header beats latency", with(func(e *events.Response) { e.ComputeCost, e.LatencyRate = "3", one }), 3 * one, byHeader, flawNone},
		{"bad header keeps the base, not the latency", with(func(e *events.Response) { e.ComputeCost, e.LatencyRate = "-3", one }), one, byBase, flawMalformed},
		{"latency", priced(2 * one), 5 * one, byLatency, flawNone},
		{"latency rounds down", with(func(e *events.Response) { e.LatencyRate, e.Duration = 1, 1_999_999 }), 1, byLatency, flawNone},
		{"latency is capped", priced(bucket.MaxRate), 1000 * one, byLatency, flawNone},
		{"latency beyond 64 bits", with(func(e *events.Response) { e.LatencyRate, e.Duration, e.MaxCost = 1<<62, 1<<62, 0 }), bucket.MaxMicro, byLatency, flawNone},
		{"5xx pays the base", with(func(e *events.Response) { e.Status = 503 }), one, byBase, flawNone},
		{"timeout pays", with(func(e *events.Response) { e.Outcome, e.Status = events.OutcomeTimeout, 0 }), one, byBase, flawNone},
		{"abort pays what was used", with(func(e *events.Response) { e.Outcome, e.LatencyRate = events.OutcomeAborted, 4*one }), 10 * one, byLatency, flawNone},
		{"unreached pays where its route keeps", with(func(e *events.Response) { e.Outcome, e.Status = events.OutcomeUnreached, 0 }), one, byBase, flawNone},
		{"timeout pays nothing where its route refunds", with(func(e *events.Response) { e.Outcome, e.Refund = events.OutcomeTimeout, true }), 0, byRefund, flawNone},
		{"unreached pays nothing", with(func(e *events.Response) {
			e.Outcome, e.Refund, e.ComputeCost, e.LatencyRate = events.OutcomeUnreached, true, "7", one
		}), 0, byRefund, flawNone},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cost, by, why := realCost(c.event)
			if cost != c.cost || by != c.by || why != c.why {
				t.Errorf("got %d by %s (%q), want %d by %s (%q)", cost, by, why, c.cost, c.by, c.why)
			}
		})
	}
}

// Values that ParseFloat and its like would take, or that would overflow.
func TestRealCostHostile(t *testing.T) {
	t.Parallel()
	for _, v := range []string{
		"NaN", "nan", "Inf", "+Inf", "-Inf", "infinity", "-5", "+5", "-0", "1e309", "1e3", "1E3", "0x1p4", "0x10", "1_000",
		"5 ", " 5", "5\n", "5\x00", "5, 6", "5,6", "5;6", ".", ".5", "5.", "5.1.2", "1.0000001", "1234567890",
		strings.Repeat("9", 400), "0." + strings.Repeat("0", 400) + "1", "\u0663", "\uff15", "\u00bd", "true", "null", `"5"`, "--5", "5%",
	} {
		e := events.Response{Base: one, ComputeCost: v, LatencyRate: one, Duration: 9_000_000, Outcome: events.OutcomeOK}
		cost, by, why := realCost(e)
		if cost != one || by != byBase || why != flawMalformed {
			t.Errorf("%q: got %d by %s (%q), want the base, malformed", v, cost, by, why)
		}
	}
}

// parseCost against its specification, and against exact rationals.
func TestParseCostProperty(t *testing.T) {
	t.Parallel()
	form := regexp.MustCompile(`^\d{1,9}(\.\d{1,6})?$`)
	near := rapid.StringMatching(`[0-9]{0,11}(\.[0-9]{0,8})?[ eE+\-x_.]?`)
	rapid.Check(t, func(t *rapid.T) {
		s := near.Draw(t, "s")
		got, ok := parseCost(s)
		if ok != form.MatchString(s) {
			t.Fatalf("parseCost(%q): ok %v", s, ok)
		}
		if !ok {
			return
		}
		want, _ := new(big.Rat).SetString(s)
		want.Mul(want, big.NewRat(one, 1))
		if !want.IsInt() || want.Num().Int64() != got {
			t.Fatalf("parseCost(%q) = %d, want %s", s, got, want)
		}
	})
}

func TestLatencyCostProperty(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		rate, duration := rapid.Int64Min(0).Draw(t, "rate"), rapid.Int64Min(0).Draw(t, "duration")
		want := new(big.Int).Mul(big.NewInt(rate), big.NewInt(duration))
		want.Div(want, big.NewInt(1_000_000))
		if most := big.NewInt(bucket.MaxMicro); want.Cmp(most) > 0 {
			want = most
		}
		if got := latencyCost(rate, duration); got != want.Int64() {
			t.Fatalf("latencyCost(%d, %d) = %d, want %s", rate, duration, got, want)
		}
	})
}

func TestDelta(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name         string
		outcome      events.Outcome
		how          events.How
		base, amount int64
		real, want   int64
	}{
		{"costs more", events.OutcomeOK, events.HowRedis, 1, 1, 10, 9},
		{"costs less", events.OutcomeOK, events.HowRedis, 5, 5, 2, -3},
		{"costs the base", events.OutcomeOK, events.HowRedis, 5, 5, 5, 0},
		{"unknown moves the delta", events.OutcomeOK, events.HowUnknown, 1, 1, 10, 9},
		{"local takes all of it", events.OutcomeOK, events.HowLocal, 1, 1, 10, 10},
		{"local costs the base", events.OutcomeOK, events.HowLocal, 1, 1, 1, 1},
		{"unreached gives back", events.OutcomeUnreached, events.HowRedis, 3, 3, 0, -3},
		{"unreached, unknown, gives back", events.OutcomeUnreached, events.HowUnknown, 3, 3, 0, -3},
		{"unreached, local, took nothing", events.OutcomeUnreached, events.HowLocal, 3, 3, 0, 0},
		{"shadow pass pays the difference", events.OutcomeOK, events.HowRedis, 5, 2, 9, 4},
		{"shadow pass never gets back what it did not pay", events.OutcomeOK, events.HowRedis, 5, 2, 0, -2},
		{"shadow pass, local", events.OutcomeOK, events.HowLocal, 5, 2, 0, 0},
		{"free on admission", events.OutcomeOK, events.HowRedis, 0, 0, 7, 7},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			e := events.Response{Base: c.base, Outcome: c.outcome, Refund: c.outcome == events.OutcomeUnreached}
			if got := delta(e, events.Charge{Amount: c.amount, How: c.how}, c.real); got != c.want {
				t.Errorf("got %d, want %d", got, c.want)
			}
		})
	}
}

func tokenSpec(capacity int64) bucket.Spec {
	return bucket.Spec{Kind: bucket.TokenBucket, Capacity: capacity * one, Rate: one, SlowestRate: one, MaxDebt: 10 * capacity * one}
}

func TestFold(t *testing.T) {
	t.Parallel()
	day := bucket.Spec{Kind: bucket.DailyQuota, Capacity: 1000 * one}
	sliding := bucket.Spec{Kind: bucket.SlidingWindow, Capacity: 20 * one, Window: 10}
	b := events.ResponseBatch{
		Boot: "b", N: 1,
		Specs: []bucket.Spec{tokenSpec(20), day, tokenSpec(10), sliding},
		Events: []events.Response{
			{ID: "1", Client: "ann", Time: 100, Base: one, ComputeCost: "4", Outcome: events.OutcomeOK, Charges: []events.Charge{
				{Scope: "r", Spec: 0, Amount: one, How: events.HowRedis},
				{Scope: bucket.ScopeDay, Spec: 1, Amount: one, Window: 7, How: events.HowRedis}}},
			// Later, under a lowered limit: its spec and time hold for the sum.
			{ID: "2", Client: "ann", Time: 300, Base: one, ComputeCost: "3", Outcome: events.OutcomeOK, Charges: []events.Charge{
				{Scope: "r", Spec: 2, Amount: one, How: events.HowRedis}}},
			// Earlier, though further on in the batch.
			{ID: "3", Client: "ann", Time: 200, Base: one, ComputeCost: "NaN", Outcome: events.OutcomeOK, Charges: []events.Charge{
				{Scope: "r", Spec: 0, Amount: one, How: events.HowLocal}}},
			// Another day, and the same window twice.
			{ID: "4", Client: "ann", Time: 400, Base: one, ComputeCost: "2", Outcome: events.OutcomeOK, Charges: []events.Charge{
				{Scope: bucket.ScopeDay, Spec: 1, Amount: one, Window: 8, How: events.HowRedis}}},
			{ID: "5", Client: "ann", Time: 401, Base: one, ComputeCost: "2", Outcome: events.OutcomeOK, Charges: []events.Charge{
				{Scope: bucket.ScopeDay, Spec: 1, Amount: one, Window: 8, How: events.HowRedis}}},
			// The algorithm was switched: another bucket of the same scope.
			{ID: "6", Client: "ann", Time: 500, Base: one, ComputeCost: "2", Outcome: events.OutcomeOK, Charges: []events.Charge{
				{Scope: "r", Spec: 3, Amount: one, Window: 5, How: events.HowRedis}}},
			// These two cancel out; nothing is sent for them, nor for their shard.
			{ID: "7", Client: "bob", Time: 1, Base: one, ComputeCost: "0", Outcome: events.OutcomeOK, Charges: []events.Charge{
				{Scope: "r", Spec: 0, Amount: one, How: events.HowRedis}}},
			{ID: "8", Client: "bob", Time: 2, Base: one, ComputeCost: "2", Outcome: events.OutcomeOK, Charges: []events.Charge{
				{Scope: "r", Spec: 0, Amount: one, How: events.HowRedis}}},
			// An admin: charged nothing.
			{ID: "9", Client: "root", Time: 1, Base: one, ComputeCost: "500", Outcome: events.OutcomeOK},
		},
	}
	got, tally := fold(b)
	want := map[int][]store.Item{store.ShardOf("ann"): {
		{Client: "ann", Scope: "r", Spec: tokenSpec(10), Delta: 6 * one, Time: 300},
		{Client: "ann", Scope: bucket.ScopeDay, Spec: day, Delta: 3 * one, Window: 7, Time: 100},
		{Client: "ann", Scope: bucket.ScopeDay, Spec: day, Delta: 2 * one, Window: 8, Time: 401},
		{Client: "ann", Scope: "r", Spec: sliding, Delta: one, Window: 5, Time: 500},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("items (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[flaw]int{flawMalformed: 1}, tally.invalid); diff != "" {
		t.Errorf("invalid costs (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[basis]int{byHeader: 8, byBase: 1}, tally.events); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// A sum that no settlement may carry is cut, and the rest counted.
func TestFoldBound(t *testing.T) {
	t.Parallel()
	b := events.ResponseBatch{Boot: "b", N: 1, Specs: []bucket.Spec{tokenSpec(20)}}
	for i := range 12 {
		b.Events = append(b.Events, events.Response{ID: fmt.Sprint(i), Client: "c", Time: 1, ComputeCost: "100000000", Outcome: events.OutcomeOK,
			Charges: []events.Charge{{Scope: "r", How: events.HowRedis}}})
	}
	got, tally := fold(b)
	item := got[store.ShardOf("c")][0]
	if item.Delta != bucket.MaxDebt || tally.clamped != 12*bucket.MaxMicro-bucket.MaxDebt {
		t.Errorf("delta %d, clamped %d", item.Delta, tally.clamped)
	}
}

// Folding never makes or loses a delta: what the items sum to is what the charges say,
// whatever the order of the events.
func TestFoldProperty(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := events.ResponseBatch{Boot: "b", N: 1, Specs: []bucket.Spec{tokenSpec(20), tokenSpec(30)}}
		want := map[string]int64{}
		for i := range rapid.IntRange(1, 40).Draw(t, "events") {
			e := events.Response{
				ID:     fmt.Sprint(i),
				Client: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "client"),
				Time:   rapid.Int64Range(1, 1000).Draw(t, "time"),
				Base:   rapid.Int64Range(0, 5).Draw(t, "base") * one,
				Outcome: rapid.SampledFrom([]events.Outcome{events.OutcomeOK, events.OutcomeUnreached,
					events.OutcomeAborted}).Draw(t, "outcome"),
				ComputeCost: rapid.SampledFrom([]string{"", "0", "3.25", "x", "900"}).Draw(t, "cost"),
				Refund:      rapid.Bool().Draw(t, "refund"),
			}
			real, _, _ := realCost(e)
			for range rapid.IntRange(0, 2).Draw(t, "charges") {
				c := events.Charge{
					Scope:  rapid.SampledFrom([]string{"r", "s"}).Draw(t, "scope"),
					Spec:   rapid.IntRange(0, 1).Draw(t, "spec"),
					Amount: rapid.Int64Range(0, e.Base).Draw(t, "amount"),
					How:    rapid.SampledFrom([]events.How{events.HowRedis, events.HowLocal, events.HowUnknown}).Draw(t, "how"),
				}
				e.Charges = append(e.Charges, c)
				want[e.Client+"/"+c.Scope] += delta(e, c, real)
			}
			b.Events = append(b.Events, e)
		}
		for k, v := range want {
			if v == 0 {
				delete(want, k)
			}
		}
		items, _ := fold(b)
		got := map[string]int64{}
		for shard, list := range items {
			st := store.Settlement{Shard: shard, Stream: "s", Seq: 1, Boot: b.Boot, N: b.N, Items: list}
			if err := st.Validate(); err != nil {
				t.Fatal(err)
			}
			for _, it := range list {
				got[it.Client+"/"+it.Scope] += it.Delta
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("deltas (-want +got):\n%s", diff)
		}
	})
}

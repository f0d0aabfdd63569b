package storetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// one is a token in micro-tokens.
const one = bucket.One

// Run runs the conformance suite. open gives each test an empty store on real time.
func Run(t *testing.T, open func(t *testing.T) store.Store) {
	t.Parallel()
	for name, test := range map[string]func(t *testing.T, s store.Store){
		"GreenUntilEmptyThenRed":      testGreenUntilEmpty,
		"YellowSpendsGrace":           testYellow,
		"PeekWritesNothing":           testPeek,
		"AllOrNothing":                testAllOrNothing,
		"YellowChargesOnlyItsLimit":   testYellowChargesOnlyItsLimit,
		"Shadow":                      testShadow,
		"CostAboveCapacity":           testCostAboveCapacity,
		"LoweredCapacityCutsBalance":  testLoweredCapacity,
		"SlidingWindow":               testSlidingWindow,
		"DailyQuota":                  testDailyQuota,
		"Refill":                      testRefill,
		"KeysApart":                   testKeysApart,
		"InvalidCalls":                testInvalid,
		"ParallelCallsDoNotOverspend": testParallel,
		"Meta":                        testMeta,
		"SettleStatuses":              testSettleStatuses,
		"SettleMovesBuckets":          testSettleBuckets,
		"SettleForgives":              testSettleForgives,
		"SettleOncePerBucket":         testSettleOncePerBucket,
		"SettleAnotherStream":         testSettleAnotherStream,
		"SettlePrunesBoots":           testSettlePrunesBoots,
		"SettleRestoredStream":        testSettleRestoredStream,
		"AdjustResets":                testReset,
		"AdjustGrants":                testGrant,
		"HealsWhatWasLost":            testHeal,
		"HealKeepsWhatIsSettled":      testHealSettled,
		"ResetIsNoLoss":               testHealAfterReset,
		"CancelledContext":            testCancelled,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

// still is a bucket that does not refill while a test runs: a micro-token a second.
func still(capacity int64) bucket.Spec {
	return bucket.Spec{Kind: bucket.TokenBucket, Capacity: capacity * one, Rate: 1, SlowestRate: 1, MaxDebt: 10 * capacity * one}
}

func withGrace(s bucket.Spec, grace int64) bucket.Spec {
	s.Grace = grace * one
	return s
}

func sliding(limit, window int64) bucket.Spec {
	return bucket.Spec{Kind: bucket.SlidingWindow, Capacity: limit * one, Window: window, MaxDebt: 10 * limit * one}
}

func daily(quota int64) bucket.Spec {
	return bucket.Spec{Kind: bucket.DailyQuota, Capacity: quota * one, MaxDebt: 10 * quota * one}
}

func limit(scope string, spec bucket.Spec) store.Limit { return store.Limit{Scope: scope, Spec: spec} }

func check(t *testing.T, s store.Store, client string, cost int64, limits ...store.Limit) store.Decision {
	t.Helper()
	return decide(t, s, store.Check{Client: client, Cost: cost, Limits: limits})
}

// decide checks, with a generous deadline of the test's own, and checks the answer's form.
func decide(t *testing.T, s store.Store, c store.Check) store.Decision {
	t.Helper()
	d, err := s.Check(t.Context(), c)
	if err != nil {
		t.Fatalf("check %+v: %v", c, err)
	}
	if len(d.Limits) != len(c.Limits) || d.Now <= 0 {
		t.Fatalf("check %+v: %d limits answered at %d", c, len(d.Limits), d.Now)
	}
	return d
}

// near fails unless got is within the refill of a minute at still's rate below or above want.
func near(t *testing.T, what string, got, want int64) {
	t.Helper()
	if diff := got - want; diff < -100 || diff > 100 {
		t.Errorf("%s: %d, want %d", what, got, want)
	}
}

func equal[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func testGreenUntilEmpty(t *testing.T, s store.Store) {
	for i := range int64(3) {
		d := check(t, s, "c", one, limit("r", still(3)))
		equal(t, "tier", d.Tier, bucket.Green)
		near(t, "remaining", d.Limits[0].Remaining, (2-i)*one)
		equal(t, "charged", d.Limits[0].Charged, one)
		equal(t, "seq", d.Limits[0].Seq, i+1)
	}
	d := check(t, s, "c", one, limit("r", still(3)))
	equal(t, "tier", d.Tier, bucket.Red)
	equal(t, "charged", d.Limits[0].Charged, 0)
	equal(t, "seq", d.Limits[0].Seq, 3)
	near(t, "wait in seconds", d.Limits[0].Wait/1e6, one)
	if d.Limits[0].Gen == 0 || d.Limits[0].Gen > d.Now {
		t.Errorf("gen %d at %d", d.Limits[0].Gen, d.Now)
	}
}

func testYellow(t *testing.T, s store.Store) {
	l := limit("r", withGrace(still(5), 2))
	check(t, s, "c", 5*one-one/2, l) // half a token is left
	d := check(t, s, "c", one, l)
	equal(t, "tier", d.Tier, bucket.Yellow)
	equal(t, "charged", d.Limits[0].Charged, 0)
	equal(t, "grace charged", d.Limits[0].GraceCharged, one)
	d = check(t, s, "c", one+one/4, l) // grace has 1, the balance pays the quarter
	equal(t, "tier", d.Tier, bucket.Yellow)
	near(t, "charged", d.Limits[0].Charged, one/4)
	near(t, "grace", d.Limits[0].Grace, 0)
	equal(t, "tier", check(t, s, "c", one, l).Tier, bucket.Red)
}

func testPeek(t *testing.T, s store.Store) {
	l := limit("r", withGrace(still(5), 1))
	d := check(t, s, "c", 0, l)
	want := store.LimitState{Tier: bucket.Green, Remaining: 5 * one, Grace: one}
	equal(t, "absent bucket", d.Limits[0], want)
	check(t, s, "c", 2*one, l)
	check(t, s, "c", 0, l)
	d = check(t, s, "c", 0, l)
	near(t, "remaining", d.Limits[0].Remaining, 3*one)
	equal(t, "seq", d.Limits[0].Seq, 1)
}

func testAllOrNothing(t *testing.T, s store.Store) {
	route, plan, quota := limit("r", withGrace(still(10), 2)), limit(bucket.ScopePlan, still(2)), limit(bucket.ScopeDay, daily(100))
	for range 2 {
		equal(t, "tier", check(t, s, "c", one, route, plan, quota).Tier, bucket.Green)
	}
	d := check(t, s, "c", one, route, plan, quota)
	equal(t, "tier", d.Tier, bucket.Red)
	equal(t, "own tiers", []bucket.Tier{d.Limits[0].Tier, d.Limits[1].Tier, d.Limits[2].Tier}, []bucket.Tier{bucket.Green, bucket.Red, bucket.Green})
	near(t, "route", d.Limits[0].Remaining, 8*one)
	near(t, "plan", d.Limits[1].Remaining, 0)
	equal(t, "quota", d.Limits[2].Remaining, 98*one)
	for i, l := range d.Limits {
		equal(t, fmt.Sprintf("charged %d", i), l.Charged+l.GraceCharged, 0)
		equal(t, fmt.Sprintf("seq %d", i), l.Seq, 2)
	}
}

func testYellowChargesOnlyItsLimit(t *testing.T, s store.Store) {
	route, plan := limit("r", withGrace(still(5), 1)), limit(bucket.ScopePlan, still(20))
	check(t, s, "c", 5*one, route, plan)
	d := check(t, s, "c", one, route, plan)
	equal(t, "tier", d.Tier, bucket.Yellow)
	equal(t, "route's grace", d.Limits[0].GraceCharged, one)
	equal(t, "plan charged", d.Limits[1].Charged, 0)
	near(t, "plan", d.Limits[1].Remaining, 15*one)
}

func testShadow(t *testing.T, s store.Store) {
	route, plan := limit("r", withGrace(still(5), 1)), limit(bucket.ScopePlan, still(8))
	shadow := func(cost int64) store.Decision {
		t.Helper()
		return decide(t, s, store.Check{Client: "c", Cost: cost, Shadow: true, Limits: []store.Limit{route, plan}})
	}
	shadow(5 * one)
	d := shadow(one) // yellow: grace pays for the route, the plan pays too
	equal(t, "tier", d.Tier, bucket.Yellow)
	equal(t, "grace charged", d.Limits[0].GraceCharged, one)
	equal(t, "plan charged", d.Limits[1].Charged, one)
	d = shadow(3 * one) // red: what is there
	equal(t, "tier", d.Tier, bucket.Red)
	near(t, "route charged", d.Limits[0].Charged, 0)
	near(t, "plan charged", d.Limits[1].Charged, 2*one)
	near(t, "plan", d.Limits[1].Remaining, 0)
}

func testCostAboveCapacity(t *testing.T, s store.Store) {
	for _, spec := range []bucket.Spec{still(3), sliding(3, 60)} {
		d := check(t, s, "c", 4*one, limit(string(spec.Kind[:2]), spec))
		equal(t, "tier", d.Tier, bucket.Red)
		equal(t, "wait", d.Limits[0].Wait, bucket.Never)
		equal(t, "remaining", d.Limits[0].Remaining, 3*one)
		equal(t, "seq", d.Limits[0].Seq, 0)
	}
}

func testLoweredCapacity(t *testing.T, s store.Store) {
	check(t, s, "c", one, limit("r", still(1000)))
	d := check(t, s, "c", 0, limit("r", still(10)))
	equal(t, "remaining", d.Limits[0].Remaining, 10*one)
	for range 10 {
		equal(t, "tier", check(t, s, "c", one, limit("r", still(10))).Tier, bucket.Green)
	}
	equal(t, "tier", check(t, s, "c", one, limit("r", still(10))).Tier, bucket.Red)
}

func testSlidingWindow(t *testing.T, s store.Store) {
	l := limit("r", sliding(5, 7*24*3600)) // hardly ever crosses a boundary
	for i := range int64(5) {
		d := check(t, s, "c", one, l)
		equal(t, "tier", d.Tier, bucket.Green)
		equal(t, "remaining", d.Limits[0].Remaining, (4-i)*one)
		equal(t, "window", d.Limits[0].Window, d.Now/(7*24*3600*1e6))
	}
	d := check(t, s, "c", one, l)
	equal(t, "tier", d.Tier, bucket.Red)
	if d.Limits[0].Wait <= 0 || d.Limits[0].Reset < d.Limits[0].Wait || d.Limits[0].Reset > 2*7*24*3600*1e6 {
		t.Errorf("wait %d, reset %d", d.Limits[0].Wait, d.Limits[0].Reset)
	}
}

func testDailyQuota(t *testing.T, s store.Store) {
	l := limit(bucket.ScopeDay, daily(2))
	check(t, s, "c", one, l)
	d := check(t, s, "c", one, l)
	equal(t, "tier", d.Tier, bucket.Green)
	equal(t, "window", d.Limits[0].Window, d.Now/86_400e6)
	d = check(t, s, "c", one, l)
	equal(t, "tier", d.Tier, bucket.Red)
	untilMidnight := (d.Now/86_400e6+1)*86_400e6 - d.Now
	equal(t, "wait", d.Limits[0].Wait, untilMidnight)
	equal(t, "reset", d.Limits[0].Reset, untilMidnight)
}

func testRefill(t *testing.T, s store.Store) {
	spec := bucket.Spec{Kind: bucket.TokenBucket, Capacity: 100 * one, Rate: 1000 * one, SlowestRate: 200 * one}
	start := check(t, s, "c", 100*one, limit("r", spec))
	for {
		d := check(t, s, "c", 0, limit("r", spec))
		want := min(100*one, start.Limits[0].Remaining+(d.Now-start.Now)*1000)
		if d.Limits[0].Remaining != want {
			t.Fatalf("after %d µs: %d, want %d", d.Now-start.Now, d.Limits[0].Remaining, want)
		}
		if want == 100*one {
			break
		}
	}
}

func testKeysApart(t *testing.T, s store.Store) {
	names := []string{"", " ", "a", "a:b", "a b", "a\nb", "a{b}", "a%3Ab", "a%3a", "a:", ":a", "é", "\xff", "~", "A",
		strings.Repeat("x", 10_000), strings.Repeat("x", 10_000) + "y"}
	for _, scope := range names[1:] {
		for _, client := range names {
			d := check(t, s, client, one, limit(scope, still(2)))
			if d.Limits[0].Seq != 1 {
				t.Errorf("scope %.20q, client %.20q shares another's bucket", scope, client)
			}
		}
	}
	check(t, s, "x", one, limit("r1", still(2)), limit("r2", still(2))) // two scopes, one slot
}

func testInvalid(t *testing.T, s store.Store) {
	ok := limit("r", still(5))
	for name, c := range map[string]store.Check{
		"no limits":     {Client: "c", Cost: one},
		"many limits":   {Client: "c", Limits: []store.Limit{limit("a", still(1)), limit("b", still(1)), limit("c", still(1)), limit("d", still(1)), limit("e", still(1))}},
		"negative cost": {Client: "c", Cost: -1, Limits: []store.Limit{ok}},
		"huge cost":     {Client: "c", Cost: bucket.MaxMicro + 1, Limits: []store.Limit{ok}},
		"twice":         {Client: "c", Limits: []store.Limit{ok, ok}},
		"bad spec":      {Client: "c", Limits: []store.Limit{limit("r", bucket.Spec{})}},
		"two graces":    {Client: "c", Limits: []store.Limit{limit("a", withGrace(still(5), 1)), limit("b", withGrace(still(5), 1))}},
		"seen of some":  {Client: "c", Limits: []store.Limit{ok}, Seen: make([]store.Seen, 2)},
		"seen no time":  {Client: "c", Limits: []store.Limit{ok}, Seen: []store.Seen{{Gen: 1}}},
		"seen too much": {Client: "c", Limits: []store.Limit{ok}, Seen: []store.Seen{{Gen: 1, Time: 1, Tokens: bucket.MaxMicro + 1}}},
		"seen window":   {Client: "c", Limits: []store.Limit{limit("r", sliding(5, 60))}, Seen: []store.Seen{{Gen: 1, Time: 1}}},
		"day's scope":   {Client: "c", Limits: []store.Limit{limit("r", daily(5))}},
	} {
		if _, err := s.Check(t.Context(), c); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := s.Meta(t.Context(), store.Shards); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("shard out of range: %v", err)
	}
	_, err := s.Settle(t.Context(), store.Settlement{Shard: (store.ShardOf("c") + 1) % store.Shards, Stream: "s", Seq: 1, Boot: "b", N: 1,
		Items: []store.Item{{Client: "c", Scope: "r", Spec: still(5), Delta: 1}}})
	if !errors.Is(err, store.ErrInvalid) {
		t.Errorf("item of another shard: %v", err)
	}
}

// Case 16: budget 100, 5 parallel calls of 50, each settled to 150.
func testParallel(t *testing.T, s store.Store) {
	l := limit("r", still(100))
	shard := begin(t, s, "c")
	var (
		wg       sync.WaitGroup
		mu       sync.Mutex
		admitted int
	)
	for range 5 {
		wg.Go(func() {
			d, err := s.Check(t.Context(), store.Check{Client: "c", Cost: 50 * one, Limits: []store.Limit{l}})
			if err != nil {
				t.Error(err)
			} else if d.Tier == bucket.Green {
				mu.Lock()
				admitted++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	equal(t, "admitted", admitted, 2)
	for seq := range uint64(2) {
		settle(t, s, store.Settlement{Shard: shard, Stream: "s", Seq: seq + 1, Boot: "b", N: seq + 1,
			Items: []store.Item{{Client: "c", Scope: "r", Spec: l.Spec, Delta: 100 * one}}}, store.Applied)
	}
	d := check(t, s, "c", one, l)
	equal(t, "tier", d.Tier, bucket.Red)
	near(t, "remaining", d.Limits[0].Remaining, -200*one)
}

// begin gives the client's shard an epoch of stream "s" at cursor 0.
func begin(t *testing.T, s store.Store, client string) int {
	t.Helper()
	shard := store.ShardOf(client)
	if _, err := s.Begin(t.Context(), shard, "s", 0); err != nil {
		t.Fatal(err)
	}
	return shard
}

func settle(t *testing.T, s store.Store, st store.Settlement, want store.SettleStatus) store.Settled {
	t.Helper()
	got, err := s.Settle(t.Context(), st)
	if err != nil {
		t.Fatalf("settle %+v: %v", st, err)
	}
	if got.Status != want {
		t.Fatalf("settle %+v: %s, want %s", st, got.Status, want)
	}
	return got
}

func testMeta(t *testing.T, s store.Store) {
	m, err := s.Meta(t.Context(), 7)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "meta of an untouched shard", m, store.Meta{})
	first, err := s.Begin(t.Context(), 7, "stream-1", 42)
	if err != nil {
		t.Fatal(err)
	}
	if first.Epoch == "" || first.Stream != "stream-1" || first.Cursor != 42 {
		t.Errorf("begun: %+v", first)
	}
	again, err := s.Begin(t.Context(), 7, "stream-1", 1)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "second begin", again, first)
	m, err = s.Meta(t.Context(), 7)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "meta", m, first)
	moved, err := s.Begin(t.Context(), 7, "stream-2", 1)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "begun in another stream", moved, store.Meta{Epoch: first.Epoch, Stream: "stream-2", Cursor: 1})
	if other, err := s.Meta(t.Context(), 8); err != nil || other != (store.Meta{}) {
		t.Errorf("another shard: %+v, %v", other, err)
	}
}

func testSettleStatuses(t *testing.T, s store.Store) {
	l := limit("r", still(100))
	shard := store.ShardOf("c")
	item := []store.Item{{Client: "c", Scope: "r", Spec: l.Spec, Delta: 10 * one}}
	at := func(prev, seq uint64, boot string, n uint64) store.Settlement {
		return store.Settlement{Shard: shard, Stream: "s", Prev: prev, Seq: seq, Boot: boot, N: n, Items: item}
	}
	check(t, s, "c", one, l)
	settle(t, s, at(0, 1, "b", 1), store.Lost)
	begin(t, s, "c")
	other := at(0, 1, "b", 1)
	other.Stream = "another"
	settle(t, s, other, store.Lost)
	equal(t, "applied", settle(t, s, at(0, 5, "b", 1), store.Applied).Cursor, 5)
	equal(t, "the same again", settle(t, s, at(0, 5, "b", 1), store.Behind).Cursor, 5)
	equal(t, "republished", settle(t, s, at(5, 6, "b", 1), store.Duplicate).Cursor, 6)
	equal(t, "before the cursor", settle(t, s, at(0, 3, "b2", 1), store.Behind).Cursor, 6)
	equal(t, "store gone back", settle(t, s, at(9, 10, "b", 2), store.Rewind).Cursor, 6)
	equal(t, "another boot", settle(t, s, at(6, 7, "b2", 1), store.Applied).Cursor, 7)
	idle := store.Settlement{Shard: shard, Stream: "s", Prev: 7, Seq: 20}
	equal(t, "idle", settle(t, s, idle, store.Applied), store.Settled{Status: store.Applied, Cursor: 20})
	near(t, "remaining", check(t, s, "c", 0, l).Limits[0].Remaining, (100-1-20)*one)
	m, err := s.Meta(t.Context(), shard)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "cursor", m.Cursor, 20)
}

func testSettleBuckets(t *testing.T, s store.Store) {
	shard := begin(t, s, "c")
	token, window, quota := limit("t", still(100)), limit("w", sliding(100, 7*24*3600)), limit(bucket.ScopeDay, daily(100))
	d := check(t, s, "c", 10*one, token, window, quota)
	items := func(delta int64) []store.Item {
		var out []store.Item
		for i, l := range []store.Limit{token, window, quota} {
			out = append(out, store.Item{Client: "c", Scope: l.Scope, Spec: l.Spec, Delta: delta, Window: d.Limits[i].Window, Time: d.Now})
		}
		return out
	}
	st := store.Settlement{Shard: shard, Stream: "s", Seq: 1, Boot: "b", N: 1, Items: items(120 * one)}
	for i, it := range settle(t, s, st, store.Applied).Items {
		near(t, "remaining after a debit", it.Remaining, -30*one)
		equal(t, "seq", it.Seq, 2)
		equal(t, "gen", it.Gen, d.Limits[i].Gen)
	}
	red := check(t, s, "c", one, token, window, quota)
	equal(t, "tier", red.Tier, bucket.Red)
	for i, l := range red.Limits {
		equal(t, "own tier", l.Tier, bucket.Red)
		near(t, "remaining", l.Remaining, -30*one)
		equal(t, fmt.Sprintf("settled %d", i), l.Settled, 1)
	}
	st = store.Settlement{Shard: shard, Stream: "s", Prev: 1, Seq: 2, Boot: "b", N: 2, Items: items(-1000 * one)}
	for _, it := range settle(t, s, st, store.Applied).Items {
		near(t, "remaining after a refund", it.Remaining, 100*one)
	}
	// A bucket nobody has charged since it was full is charged when it was, and refilled since.
	spec := bucket.Spec{Kind: bucket.TokenBucket, Capacity: 10 * one, Rate: one, SlowestRate: one / 5, MaxDebt: 100 * one}
	absent := store.Settlement{Shard: shard, Stream: "s", Prev: 2, Seq: 3, Boot: "b", N: 3,
		Items: []store.Item{{Client: "c", Scope: "absent", Spec: spec, Delta: 50 * one, Time: d.Now - 30e6}}}
	before := check(t, s, "c", 0, limit("other", spec)).Now
	got := settle(t, s, absent, store.Applied).Items[0].Remaining
	if least := -40*one + (before - d.Now + 30e6); got < least || got > least+60*one {
		t.Errorf("absent bucket: %d, want a little above %d", got, least)
	}
}

func testSettleForgives(t *testing.T, s store.Store) {
	shard := begin(t, s, "c")
	spec := still(10)
	spec.MaxDebt = 20 * one
	got := settle(t, s, store.Settlement{Shard: shard, Stream: "s", Seq: 1, Boot: "b", N: 1,
		Items: []store.Item{{Client: "c", Scope: "r", Spec: spec, Delta: 50 * one, Time: 1 << 52}}}, store.Applied)
	near(t, "remaining", got.Items[0].Remaining, -20*one)
	near(t, "forgiven", got.Items[0].Forgiven, 20*one)
	d := check(t, s, "c", one, limit("r", spec))
	equal(t, "tier", d.Tier, bucket.Red)
	near(t, "wait in seconds", d.Limits[0].Wait/1e6, 21*one)
}

// A stream that was made anew counts from 1: its messages are settled into buckets that
// have seen higher sequences, and batches that were in the old stream too are known.
func testSettleAnotherStream(t *testing.T, s store.Store) {
	shard := begin(t, s, "c")
	l := limit("r", still(100))
	at := func(stream string, seq, n uint64) store.Settlement {
		return store.Settlement{Shard: shard, Stream: stream, Seq: seq, Boot: "b", N: n,
			Items: []store.Item{{Client: "c", Scope: "r", Spec: l.Spec, Delta: 10 * one}}}
	}
	check(t, s, "c", one, l)
	settle(t, s, at("s", 1000, 1), store.Applied)
	settle(t, s, at("s2", 1, 2), store.Lost)
	for i, stream := range []string{"s2", "s3"} {
		if _, err := s.Begin(t.Context(), shard, stream, 0); err != nil {
			t.Fatal(err)
		}
		n := uint64(i + 1)
		settle(t, s, at(stream, 1, n), store.Duplicate)
		got := settle(t, s, at(stream, 2, n+1), store.Applied)
		near(t, "remaining", got.Items[0].Remaining, (99-10*int64(n+1))*one)
		settle(t, s, at(stream, 2, n+1), store.Behind)
	}
}

// A bucket that a later sequence has been settled into takes no earlier one, whatever the cursor.
// A stream that was restored from a backup counts on from less. What it still has of what was settled is known by
// its batch; what is new under an old sequence is settled.
func testSettleRestoredStream(t *testing.T, s store.Store) {
	l := limit("r", still(100))
	shard := begin(t, s, "c")
	item := store.Item{Client: "c", Scope: "r", Spec: l.Spec, Delta: 10 * one, Time: check(t, s, "c", 0, l).Now}
	deliver := func(prev, seq, n uint64, want store.SettleStatus) {
		t.Helper()
		settle(t, s, store.Settlement{Shard: shard, Stream: "s", Prev: prev, Seq: seq, Boot: "b", N: n, Items: []store.Item{item}}, want)
	}
	for seq := uint64(1); seq <= 3; seq++ {
		deliver(seq-1, seq, seq, store.Applied)
	}
	rebase := func(from, want uint64) {
		t.Helper()
		m, err := s.Rebase(t.Context(), shard, "s", from, 0)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "cursor", m.Cursor, want)
		equal(t, "stream", m.Stream, "s")
	}
	rebase(2, 3) // another settler has gone on
	rebase(3, 0)
	deliver(0, 1, 1, store.Duplicate)
	deliver(1, 2, 4, store.Applied) // published since: 2 and 3 are not in the backup
	deliver(2, 3, 5, store.Applied)
	near(t, "remaining", check(t, s, "c", 0, l).Limits[0].Remaining, 50*one)
}

func testSettleOncePerBucket(t *testing.T, s store.Store) {
	shard := begin(t, s, "c")
	index := check(t, s, "c", one, limit("w", sliding(100, 7*24*3600))).Limits[0].Window
	item := func(window, delta int64) store.Item {
		return store.Item{Client: "c", Scope: "w", Spec: sliding(100, 7*24*3600), Delta: delta, Window: window}
	}
	// Two windows of one bucket in one settlement: both count, each once.
	got := settle(t, s, store.Settlement{Shard: shard, Stream: "s", Seq: 9, Boot: "b", N: 1,
		Items: []store.Item{item(index, 4*one), item(index-1, 0)}}, store.Applied)
	equal(t, "remaining", got.Items[1].Remaining, 95*one)
	equal(t, "seq", got.Items[1].Seq, 3)
}

func testSettlePrunesBoots(t *testing.T, s store.Store) {
	shard := begin(t, s, "c")
	settle(t, s, store.Settlement{Shard: shard, Stream: "s", Seq: 1, Boot: "old", N: 7}, store.Applied)
	settle(t, s, store.Settlement{Shard: shard, Stream: "s", Seq: 2, Boot: "kept", N: 7}, store.Applied)
	settle(t, s, store.Settlement{Shard: shard, Stream: "s", Seq: 3, Boot: "new", N: 1, Oldest: 2}, store.Applied)
	settle(t, s, store.Settlement{Shard: shard, Stream: "s", Seq: 4, Boot: "kept", N: 7}, store.Duplicate)
	settle(t, s, store.Settlement{Shard: shard, Stream: "s", Seq: 5, Boot: "old", N: 7}, store.Applied)
}

func testCancelled(t *testing.T, s store.Store) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Check(ctx, store.Check{Client: "c", Cost: one, Limits: []store.Limit{limit("r", still(1))}}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("check: %v", err)
	}
	if _, err := s.Settle(ctx, store.Settlement{Stream: "s", Seq: 1}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("settle: %v", err)
	}
	equal(t, "tier", check(t, s, "c", one, limit("r", still(1))).Tier, bucket.Green)
}

func adjust(t *testing.T, s store.Store, a store.Adjustment) store.ItemState {
	t.Helper()
	got, err := s.Adjust(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// testReset: a reset makes a bucket whole as a new generation, and settles nothing again.
func testReset(t *testing.T, s store.Store) {
	l := store.Limit{Scope: "r", Spec: withGrace(still(10), 2)}
	before := check(t, s, "c", 10*one, l).Limits[0]
	settlement := func(seq uint64, delta int64) store.Settlement {
		return store.Settlement{Shard: store.ShardOf("c"), Stream: "s", Prev: seq - 1, Seq: seq, Boot: "b", N: seq,
			Items: []store.Item{{Client: "c", Scope: "r", Spec: l.Spec, Delta: delta, Time: before.Gen}}}
	}
	if _, err := s.Begin(t.Context(), store.ShardOf("c"), "s", 0); err != nil {
		t.Fatal(err)
	}
	settle(t, s, settlement(1, 30*one), store.Applied)
	got := adjust(t, s, store.Adjustment{Client: "c", Limit: l, Reset: true})
	if got.Remaining != 10*one || got.Gen <= before.Gen || got.Seq != 1 {
		t.Errorf("after a reset: %+v; the generation before was %d", got, before.Gen)
	}
	if again := adjust(t, s, store.Adjustment{Client: "c", Limit: l, Reset: true}); again.Gen <= got.Gen || again.Seq != 1 {
		t.Errorf("after another: %+v", again)
	}
	// What was settled stays marked, so that a replay does not settle it again.
	if x := check(t, s, "c", 0, l).Limits[0]; x.Remaining != 10*one || x.Grace != 2*one || x.Settled == 0 {
		t.Errorf("%+v", x)
	}
	// What is settled later still counts.
	near(t, "remaining", settle(t, s, settlement(2, 4*one), store.Applied).Items[0].Remaining, 6*one)
	// A bucket that nobody ever charged gets a generation too.
	if x := adjust(t, s, store.Adjustment{Client: "new", Limit: l, Reset: true}); x.Remaining != 10*one || x.Gen == 0 || x.Seq != 1 {
		t.Errorf("%+v", x)
	}
}

// testGrant: a grant gives back, out of debt too, and never above the capacity.
func testGrant(t *testing.T, s store.Store) {
	token := store.Limit{Scope: "r", Spec: still(10)}
	sliding := store.Limit{Scope: "w", Spec: bucket.Spec{Kind: bucket.SlidingWindow, Capacity: 10 * one, Window: 3600}}
	daily := store.Limit{Scope: bucket.ScopeDay, Spec: bucket.Spec{Kind: bucket.DailyQuota, Capacity: 10 * one}}
	for _, l := range []store.Limit{token, sliding, daily} {
		before := check(t, s, "c", 8*one, l).Limits[0]
		got := adjust(t, s, store.Adjustment{Client: "c", Limit: l, Grant: 5 * one})
		near(t, l.Scope, got.Remaining, 7*one)
		if got.Gen != before.Gen || got.Seq != before.Seq+1 {
			t.Errorf("%s: %+v, before it %+v", l.Scope, got, before)
		}
		if got = adjust(t, s, store.Adjustment{Client: "c", Limit: l, Grant: bucket.MaxMicro}); got.Remaining != 10*one {
			t.Errorf("%s: %+v", l.Scope, got)
		}
	}
	for _, a := range []store.Adjustment{
		{Client: "c", Limit: token}, {Client: "c", Limit: token, Grant: -1}, {Client: "c", Limit: token, Grant: bucket.MaxMicro + 1},
		{Client: "c", Limit: token, Reset: true, Grant: 1}, {Client: "c", Reset: true},
	} {
		if _, err := s.Adjust(t.Context(), a); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("%+v: got %v", a, err)
		}
	}
}

// seenOf is what a decision told of its only limit.
func seenOf(d store.Decision) store.Seen {
	l := d.Limits[0]
	return store.Seen{Gen: l.Gen, Seq: l.Seq, Settled: l.Settled, Tokens: l.Remaining, Grace: l.Grace, Time: d.Now}
}

func testHeal(t *testing.T, s store.Store) {
	l := limit("r", still(100))
	ask := func(cost int64, seen store.Seen) store.Decision {
		return decide(t, s, store.Check{Client: "c", Cost: cost, Limits: []store.Limit{l}, Seen: []store.Seen{seen}})
	}
	now := check(t, s, "c", 0, l).Now
	lost := store.Seen{Gen: 7, Seq: 41, Settled: 3, Tokens: 50 * one, Time: now}

	d := ask(0, lost) // a peek tells of it, and stores nothing
	near(t, "peeked", d.Limits[0].Remaining, 50*one)
	near(t, "after a peek", check(t, s, "c", 0, l).Limits[0].Remaining, 100*one)

	d = ask(10*one, lost)
	near(t, "healed and charged", d.Limits[0].Remaining, 40*one)
	equal(t, "healed", d.Limits[0].Healed, true)
	equal(t, "gen", d.Limits[0].Gen, 7)
	equal(t, "seq", d.Limits[0].Seq, 42)
	equal(t, "settled", d.Limits[0].Settled, 3)
	d = ask(10*one, lost) // who saw less says nothing new
	near(t, "not healed again", d.Limits[0].Remaining, 30*one)
	equal(t, "healed", d.Limits[0].Healed, false)

	debt := seenOf(d)
	debt.Seq, debt.Tokens = debt.Seq+5, -20*one // changes that a stale replica doesn't have
	d = ask(one, debt)
	equal(t, "tier in debt", d.Tier, bucket.Red)
	near(t, "denied, and stored nevertheless", check(t, s, "c", 0, l).Limits[0].Remaining, -20*one)

	higher := store.Seen{Gen: 9, Seq: 1, Settled: 8, Tokens: 90 * one, Time: now}
	d = ask(one, higher)
	equal(t, "healed upwards", d.Limits[0].Healed, false)
	near(t, "the lower one", d.Limits[0].Remaining, -20*one)
	equal(t, "settled of the lower one", d.Limits[0].Settled, 3)

	// What is lost refills meanwhile, by the rate that it has now.
	fast := still(100)
	fast.Rate, fast.SlowestRate = 10*one, 2*one
	d = decide(t, s, store.Check{Client: "d", Cost: one, Limits: []store.Limit{limit("r", fast)}, Seen: []store.Seen{
		{Gen: 7, Seq: 1, Tokens: 0, Time: now - 5_000_000}}})
	if got := d.Limits[0].Remaining; got < 49*one || got > 99*one || !d.Limits[0].Healed {
		t.Errorf("refilled to %d, want what 5 s give and the test took besides, less a token", got)
	}
}

// Heal, then replay: what the healed balance holds already is not settled into it again, and the rest is.
func testHealSettled(t *testing.T, s store.Store) {
	l := limit("r", still(100))
	shard := begin(t, s, "c")
	now := check(t, s, "c", 0, l).Now
	d := decide(t, s, store.Check{Client: "c", Cost: one, Limits: []store.Limit{l}, Seen: []store.Seen{
		{Gen: 7, Seq: 41, Settled: 2, Tokens: 50 * one, Time: now}}})
	near(t, "healed", d.Limits[0].Remaining, 49*one)
	for seq := uint64(1); seq <= 3; seq++ {
		settle(t, s, store.Settlement{
			Shard: shard, Stream: "s", Prev: seq - 1, Seq: seq, Boot: "b", N: seq,
			Items: []store.Item{{Client: "c", Scope: "r", Spec: l.Spec, Delta: 10 * one, Time: now}},
		}, store.Applied)
	}
	near(t, "after the replay of 1 to 3", check(t, s, "c", 0, l).Limits[0].Remaining, 39*one)
}

// Who saw a bucket before an administrator's reset must not take the reset back, also when it is lost in its turn.
func testHealAfterReset(t *testing.T, s store.Store) {
	l := limit("r", still(100))
	before := seenOf(check(t, s, "c", 90*one, l))
	adjust(t, s, store.Adjustment{Client: "c", Limit: l, Reset: true})
	d := decide(t, s, store.Check{Client: "c", Cost: one, Limits: []store.Limit{l}, Seen: []store.Seen{before}})
	near(t, "after the reset", d.Limits[0].Remaining, 99*one)
	equal(t, "healed", d.Limits[0].Healed, false)
	later := seenOf(d)
	later.Seq, later.Tokens, later.Time = later.Seq+1, 60*one, later.Time+1
	d = decide(t, s, store.Check{Client: "c", Cost: one, Limits: []store.Limit{l}, Seen: []store.Seen{later}})
	near(t, "a loss after the reset", d.Limits[0].Remaining, 59*one)
}

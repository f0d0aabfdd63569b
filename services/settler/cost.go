package settler

import (
	"math/bits"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// basis says what a settled cost rests on.
type basis string

const (
	byHeader  basis = "header"  // X-Compute-Cost
	byLatency basis = "latency" // the route's price for a second of upstream time
	byBase    basis = "base"    // what was charged on admission
	byRefund  basis = "refund"  // no answer came, and the route gives back for that: nothing is owed
)

// flaw says why an X-Compute-Cost was not believed.
type flaw string

const (
	flawNone      flaw = ""
	flawMalformed flaw = "malformed" // not ^\d{1,9}(\.\d{1,6})?$
	flawAboveMax  flaw = "above_max" // more than the route's max_cost
)

// realCost is what a request turned out to cost, in micro-tokens, in [0, bucket.MaxMicro]:
// the upstream's word if it can be believed, else the time it took, else the base.
// A status of 5xx changes nothing: the upstream worked for it.
func realCost(e events.Response) (int64, basis, flaw) {
	if e.Refund {
		return 0, byRefund, flawNone
	}
	limit := int64(bucket.MaxMicro)
	if e.MaxCost > 0 && e.MaxCost < limit {
		limit = e.MaxCost
	}
	why := flawNone
	if e.ComputeCost != "" {
		cost, ok := parseCost(e.ComputeCost)
		switch {
		case !ok:
			why = flawMalformed
		case cost > limit:
			why = flawAboveMax
		default:
			return cost, byHeader, flawNone
		}
		return e.Base, byBase, why
	}
	if e.LatencyRate > 0 {
		return min(latencyCost(e.LatencyRate, e.Duration), limit), byLatency, flawNone
	}
	return e.Base, byBase, flawNone
}

// parseCost reads ^\d{1,9}(\.\d{1,6})?$ as micro-tokens, exactly. ASCII digits
// and one dot only: what ParseFloat takes besides (signs, exponents, hex, "_",
// "NaN", "Inf") is refused, and so is any space.
func parseCost(s string) (int64, bool) {
	const wholeDigits, fractionDigits = 9, 6
	micro, whole, fraction, dot := int64(0), 0, 0, false
	for i := range len(s) {
		switch c := s[i]; {
		case c == '.' && !dot:
			dot = true
			continue
		case c < '0' || c > '9':
			return 0, false
		case dot:
			fraction++
		default:
			whole++
		}
		if whole > wholeDigits || fraction > fractionDigits {
			return 0, false
		}
		micro = micro*10 + int64(s[i]-'0')
	}
	if whole == 0 || dot && fraction == 0 {
		return 0, false
	}
	for ; fraction < fractionDigits; fraction++ {
		micro *= 10
	}
	return micro, true
}

// latencyCost is rate (micro-tokens a second) × duration (microseconds), rounded
// down; a product beyond what a cost can be is bucket.MaxMicro.
func latencyCost(rate, duration int64) int64 {
	const second = 1_000_000
	hi, lo := bits.Mul64(uint64(rate), uint64(duration))
	if hi >= second {
		return bucket.MaxMicro
	}
	cost, _ := bits.Div64(hi, lo, second)
	return int64(min(cost, bucket.MaxMicro))
}

// delta is what settlement takes from a bucket that paid c on admission
// (negative: gives back). A request owes a bucket what it paid plus the
// difference between real cost and base, and never less than nothing, so that a
// refund can't exceed what was taken. A local charge took nothing from the store.
func delta(e events.Response, c events.Charge, real int64) int64 {
	owed := max(0, c.Amount+real-e.Base)
	if e.Refund {
		owed = 0
	}
	taken := c.Amount
	if c.How == events.HowLocal {
		taken = 0
	}
	return owed - taken
}

// bucketID names a bucket, or one window of it.
type bucketID struct {
	client, scope string
	kind          bucket.Kind
	window        int64
}

// tally counts what a batch held, for the metrics.
type tally struct {
	events  map[basis]int
	invalid map[flaw]int
	// clamped is what a sum had beyond ±bucket.MaxDebt, in micro-tokens.
	clamped int64
}

// fold turns one message into the settlements of the shards it touches. Deltas
// are summed per bucket within the message and never across messages, because a
// batch is the unit that is applied once. Buckets whose sum is zero are left
// out, and shards with nothing left too.
//
// Where a bucket's limit changed within the message the later spec holds, and
// its time is that of the latest charge: a bucket that has expired since is then
// refilled for the shorter time, which never gives away a token.
func fold(b events.ResponseBatch) (map[int][]store.Item, tally) {
	t := tally{events: map[basis]int{}, invalid: map[flaw]int{}}
	sums := map[bucketID]*store.Item{}
	var order []bucketID // first touched first, so that a message always folds to the same calls
	for _, e := range b.Events {
		real, by, why := realCost(e)
		t.events[by]++
		if why != flawNone {
			t.invalid[why]++
		}
		for _, c := range e.Charges {
			spec := b.Specs[c.Spec]
			id := bucketID{e.Client, c.Scope, spec.Kind, c.Window}
			item, ok := sums[id]
			if !ok {
				item = &store.Item{Client: e.Client, Scope: c.Scope, Window: c.Window}
				sums[id] = item
				order = append(order, id)
			}
			if e.Time >= item.Time {
				item.Spec, item.Time = spec, e.Time
			}
			item.Delta += delta(e, c, real)
		}
	}
	shards := map[int][]store.Item{}
	for _, id := range order {
		item := *sums[id]
		if item.Delta == 0 {
			continue
		}
		if bounded := min(max(item.Delta, -bucket.MaxDebt), bucket.MaxDebt); bounded != item.Delta {
			t.clamped += max(item.Delta-bounded, bounded-item.Delta)
			item.Delta = bounded
		}
		s := store.ShardOf(item.Client)
		shards[s] = append(shards[s], item)
	}
	return shards, t
}

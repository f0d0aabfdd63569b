package bucket_test

import (
	"math/rand/v2"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// Until is a promise: no such request passes before it, and without grace one passes then.
func TestUntilHolds(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(3, 1))
	held := 0
	for range 20_000 {
		now := int64(1_700_000_000_000_000) + rng.Int64N(1e12)
		entries := make([]bucket.Entry, 1+rng.IntN(2))
		for i := range entries {
			l := bucket.Limit{Kind: bucket.TokenBucket, Capacity: 1 + rng.Int64N(20), Rate: 1 + rng.Int64N(5*bucket.One), Grace: i == 0 && rng.IntN(2) == 0}
			if rng.IntN(2) == 0 {
				l.Kind, l.Window = bucket.SlidingWindow, 1+rng.Int64N(60)
			}
			s := bucket.Effective(l, bucket.One)
			entries[i] = bucket.Entry{Spec: s, State: bucket.Full(s, now)}
		}
		r := bucket.Request{Cost: 1 + rng.Int64N(3*bucket.One)}
		for range 1 + rng.IntN(30) { // some of which must be refused
			now += rng.Int64N(3 * bucket.One)
			v := bucket.Decide(entries, r, now)
			if v.Until <= 0 {
				continue
			}
			held++
			ask := func(at int64) bucket.Tier {
				copied := append([]bucket.Entry(nil), entries...)
				return bucket.Decide(copied, r, at).Tier
			}
			graceless := true
			for _, e := range entries {
				graceless = graceless && e.Spec.Grace == 0
			}
			for _, at := range []int64{now, now + v.Until - 1, now + rng.Int64N(v.Until)} {
				if tier := ask(at); tier != bucket.Red {
					t.Fatalf("%s %d µs after an answer that held for %d: %+v", tier, at-now, v.Until, entries)
				}
			}
			if tier := ask(now + v.Until); graceless && tier == bucket.Red {
				t.Fatalf("still red after %d µs: %+v", v.Until, entries)
			}
		}
	}
	if held < 10_000 {
		t.Errorf("%d answers held: the test says little", held)
	}
}

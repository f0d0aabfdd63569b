package memstore_test

import (
	"fmt"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
)

// Lower takes a bucket of any kind down to what is said, into debt too, and never up.
func TestLower(t *testing.T) {
	t.Parallel()
	const one = bucket.One
	for name, limit := range map[string]bucket.Limit{
		"token bucket":   {Kind: bucket.TokenBucket, Capacity: 20, Rate: one, Grace: true},
		"sliding window": {Kind: bucket.SlidingWindow, Capacity: 20, Window: 60, Grace: true},
		"daily quota":    {Kind: bucket.DailyQuota, Capacity: 20},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			now := int64(1_700_000_000_000_000)
			s := memstore.New(func() int64 { return now })
			l := store.Limit{Scope: "r", Spec: bucket.Effective(limit, bucket.One)}
			if limit.Kind == bucket.DailyQuota {
				l.Scope = bucket.ScopeDay
			}
			peek := func() store.LimitState {
				d, err := s.Check(t.Context(), store.Check{Client: "c", Limits: []store.Limit{l}})
				if err != nil {
					t.Fatal(err)
				}
				return d.Limits[0]
			}
			full := peek()
			for _, step := range []struct{ to, want int64 }{{7 * one, 7 * one}, {12 * one, 7 * one}, {100 * one, 7 * one}, {3 * one, 3 * one}, {-5 * one, -5 * one}} {
				s.Lower("c", l, step.to, full.Grace)
				if got := peek(); got.Remaining != step.want || got.Grace != full.Grace {
					t.Errorf("lowered to %d: %+v", step.to, got)
				}
			}
			if full.Grace > 0 {
				s.Lower("c", l, one, one)
				if got := peek(); got.Grace != one || got.Remaining != -5*one {
					t.Errorf("grace lowered: %+v", got)
				}
			}
		})
	}
}

// A bounded store forgets buckets that are nearly full, and keeps debtors.
func TestAtMost(t *testing.T) {
	t.Parallel()
	const most = 64 * 20
	now := int64(1_700_000_000_000_000)
	s := memstore.New(func() int64 { return now }, memstore.AtMost(most))
	l := store.Limit{Scope: "r", Spec: bucket.Effective(bucket.Limit{Kind: bucket.TokenBucket, Capacity: 1000, Rate: bucket.One}, bucket.One)}
	debtor := func(i int) string { return fmt.Sprintf("debtor %d", i) }
	for i := range 100 {
		s.Lower(debtor(i), l, -500*bucket.One, 0)
	}
	for i := range 5 * most {
		s.Lower(fmt.Sprintf("client %d", i), l, 999*bucket.One, 0)
	}
	kept := 0
	for i := range 5 * most {
		if _, ok := s.Bucket(bucket.TokenBucket, "r", fmt.Sprintf("client %d", i)); ok {
			kept++
		}
	}
	if kept > most || kept < most/2 {
		t.Errorf("%d buckets are kept, want about %d", kept, most)
	}
	for i := range 100 {
		if _, ok := s.Bucket(bucket.TokenBucket, "r", debtor(i)); !ok {
			t.Errorf("%s is forgotten", debtor(i))
		}
	}
}

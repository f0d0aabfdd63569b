package redisstore

import (
	"strconv"
	"strings"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/storetest"
)

// Case 27: whatever bytes name clients and scopes, a bucket is one client's in one scope, in memory as
// in Redis, and its key is short and in its client's slot.
func FuzzIdentities(f *testing.F) {
	long := strings.Repeat("x", 10_000)
	for _, seed := range [][4]string{
		{"a:b", "c", "a", "b:c"}, {"r", "", "r", " "}, {"r", "a\nb", "r", "a b"}, {"r", "{a}b", "r", "{a}c"}, {"r", long, "r", long + "x"},
		{"r", "user:alice", "s", "user:alice"}, {"r", "user:alice", "r", "user:alice"}, {"r", "a%3Ab", "r", "a:b"}, {"r", "~x", "r", "\x7ex"}, {"r", "\xff\x00", "r", "\xfe\x00"},
	} {
		f.Add(seed[0], seed[1], seed[2], seed[3])
	}
	for n := range 1000 { // such a pair in one shard
		if b := strconv.Itoa(n); store.ShardOf("c") == store.ShardOf(b+":c") {
			f.Add("a:"+b, "c", "a", b+":c")
			break
		}
	}
	redis := onRedis(f).(*clocked)
	f.Fuzz(func(t *testing.T, scope, client, otherScope, otherClient string) {
		redis.t = t
		if scope == "" || otherScope == "" {
			return
		}
		for _, spec := range []bucket.Spec{still(5), {Kind: bucket.SlidingWindow, Capacity: 5 * bucket.One, Window: 3600}, {Kind: bucket.DailyQuota, Capacity: 5 * bucket.One}} {
			a, b := scope, otherScope
			switch day := spec.Kind == bucket.DailyQuota; {
			case day:
				a, b = bucket.ScopeDay, bucket.ScopeDay
			case a == bucket.ScopeDay || b == bucket.ScopeDay:
				continue
			}
			redis.empty()
			same := a == b && client == otherClient
			for name, s := range map[string]store.Store{"memory": storetest.OnMemory(t), "redis": redis} {
				spend := func(scope, client string, cost int64) int64 {
					d, err := s.Check(t.Context(), store.Check{Client: client, Limits: []store.Limit{{Scope: scope, Spec: spec}}, Cost: cost})
					if err != nil {
						t.Fatalf("%s, %s: %q of %q: %v", name, spec.Kind, scope, client, err)
					}
					return d.Limits[0].Remaining / bucket.One
				}
				spend(a, client, 2*bucket.One)
				if left := spend(b, otherClient, 0); (left == 3) != same || left != 3 && left != 5 {
					t.Fatalf("%s, %s: %q of %q has %d left after %q of %q spent 2 of 5", name, spec.Kind, b, otherClient, left, a, client)
				}
				if left := spend(a, client, 0); left != 3 {
					t.Fatalf("%s, %s: %q of %q forgot: %d left", name, spec.Kind, a, client, left)
				}
			}
			key := bucketKey(spec.Kind, a, client)
			tag, _, _ := strings.Cut(strings.TrimLeft(key, "abcdefghijklmnopqrstuvwxyz:"), ":")
			if redis.client.Exists(t.Context(), key).Val() != 1 || len(key) > len("ratelimit:day:{63}::")+2*maxPart || tag != hashTag(store.ShardOf(client)) {
				t.Fatalf("%s: %q of %q is kept under %q", spec.Kind, a, client, key)
			}
		}
	})
}

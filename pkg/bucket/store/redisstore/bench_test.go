package redisstore

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
)

// benchLimits are what a request is checked against: its route, and with all the plan and the day. The rates are the
// Enterprise plan's, and nobody reaches them.
func benchLimits(all bool) []store.Limit {
	limits := []store.Limit{{Scope: "fast", Spec: bucket.Effective(
		bucket.Limit{Kind: bucket.TokenBucket, Capacity: 2_000, Rate: 1_000 * bucket.One, Grace: true}, bucket.One)}}
	if all {
		limits = append(limits,
			store.Limit{Scope: bucket.ScopePlan, Spec: bucket.Effective(
				bucket.Limit{Kind: bucket.TokenBucket, Capacity: 2_000, Rate: 1_000 * bucket.One}, bucket.One)},
			store.Limit{Scope: bucket.ScopeDay, Spec: bucket.Effective(
				bucket.Limit{Kind: bucket.DailyQuota, Capacity: bucket.MaxTokens}, bucket.One)})
	}
	return limits
}

// decide runs n decisions from that many concurrent callers, each time by another of 1,000 clients.
func decide(b *testing.B, callers, n int, check func(store.Check) error) time.Duration {
	b.Helper()
	limits := benchLimits(false)
	return share(b, callers, n, func(i int) error {
		return check(store.Check{Client: "client " + strconv.Itoa(i%1000), Cost: bucket.One, Limits: limits})
	})
}

// share runs do(0) to do(n-1) from concurrent callers.
func share(b *testing.B, callers, n int, do func(i int) error) time.Duration {
	b.Helper()
	var next atomic.Int64
	var wg sync.WaitGroup
	start := time.Now()
	for range callers {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(n); i = next.Add(1) {
				if err := do(int(i)); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return time.Since(start)
}

func benchStore(b *testing.B, o Options) *Store {
	b.Helper()
	o.Timeout, o.PoolTimeout, o.DialTimeout = 5*time.Second, 5*time.Second, 5*time.Second
	s, err := New(o)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.Close() })
	return s
}

func (s *Store) checkOne(c store.Check) error {
	_, err := s.Check(context.Background(), c)
	return err
}

// unpipelined is a check as one EVALSHA and one round trip of its own.
func (s *Store) unpipelined(c store.Check) error {
	a := &ask{check: c}
	s.decide([]*ask{a})
	return a.err
}

func BenchmarkCheck(b *testing.B) {
	for _, callers := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			s := benchStore(b, Options{Addrs: []string{redistest.Start(b).Addr}})
			b.ResetTimer()
			took := decide(b, callers, b.N, s.checkOne)
			b.ReportMetric(float64(b.N)/took.Seconds(), "decisions/s")
		})
	}
}

// The same 64 callers in turns: in shared pipelines, and each with a call and a connection of its own.
func BenchmarkBatching(b *testing.B) {
	const callers, turn = 64, 2_000
	r := redistest.Start(b)
	s := benchStore(b, Options{Addrs: []string{r.Addr}, PoolSize: callers})
	decide(b, callers, turn, s.unpipelined) // opens all connections
	b.ResetTimer()
	var batched, alone time.Duration
	var batchedCPU, aloneCPU float64
	var ratios []float64
	for range b.N {
		start := usedCPU(b, r)
		together := decide(b, callers, turn, s.checkOne)
		middle := usedCPU(b, r)
		apart := decide(b, callers, turn, s.unpipelined)
		batched, alone = batched+together, alone+apart
		batchedCPU += middle - start
		aloneCPU += usedCPU(b, r) - middle
		ratios = append(ratios, apart.Seconds()/together.Seconds())
	}
	slices.Sort(ratios)
	decisions := float64(b.N * turn)
	b.ReportMetric(decisions/batched.Seconds(), "batched/s")
	b.ReportMetric(decisions/alone.Seconds(), "alone/s")
	b.ReportMetric(batchedCPU*1e6/decisions, "batched-redis-µs")
	b.ReportMetric(aloneCPU*1e6/decisions, "alone-redis-µs")
	b.ReportMetric(ratios[len(ratios)/2], "x-median")
	b.ReportMetric(ratios[0], "x-least")
	b.ReportMetric(ratios[len(ratios)-1], "x-most")
}

func BenchmarkLimits(b *testing.B) {
	for _, all := range []bool{false, true} {
		limits := benchLimits(all)
		b.Run(fmt.Sprintf("limits=%d", len(limits)), func(b *testing.B) {
			s := benchStore(b, Options{Addrs: []string{redistest.Start(b).Addr}})
			b.ResetTimer()
			took := share(b, 64, b.N, func(i int) error {
				return s.checkOne(store.Check{Client: "client " + strconv.Itoa(i%1000), Cost: bucket.One, Limits: limits})
			})
			b.ReportMetric(float64(b.N)/took.Seconds(), "decisions/s")
		})
	}
}

// BenchmarkMemory is what a bucket with all fields costs in Redis: B/bucket by MEMORY USAGE (key, hash, entry), and
// B/all by how used_memory grows, with the tables of keys and of expiries.
func BenchmarkMemory(b *testing.B) {
	const buckets = 20_000
	limit := func(scope string, l bucket.Limit) []store.Limit {
		return []store.Limit{{Scope: scope, Spec: bucket.Effective(l, bucket.One)}}
	}
	for name, limits := range map[string][]store.Limit{
		"token":  limit("fast", bucket.Limit{Kind: bucket.TokenBucket, Capacity: 20, Rate: 10 * bucket.One, Grace: true}),
		"window": limit("fast", bucket.Limit{Kind: bucket.SlidingWindow, Capacity: 100, Window: 60, Grace: true}),
		"day":    limit(bucket.ScopeDay, bucket.Limit{Kind: bucket.DailyQuota, Capacity: 10_000}),
	} {
		b.Run("kind="+name, func(b *testing.B) {
			r := redistest.Start(b)
			s := benchStore(b, Options{Addrs: []string{r.Addr}})
			client := func(i int) string { return fmt.Sprintf("ip:198.51.%d.%d", i>>8, i&0xff) }
			for range b.N {
				if err := r.Client.FlushAll(b.Context()).Err(); err != nil {
					b.Fatal(err)
				}
				before := usedMemory(b, r)
				share(b, 64, buckets, func(i int) error {
					return s.checkOne(store.Check{Client: client(i), Cost: bucket.One, Limits: limits})
				})
				b.ReportMetric(float64(usedMemory(b, r)-before)/buckets, "B/all")
				one, err := r.Client.MemoryUsage(b.Context(), bucketKey(limits[0].Spec.Kind, limits[0].Scope, client(1)), 0).Result()
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(one), "B/bucket")
			}
		})
	}
}

func usedMemory(b *testing.B, r *redistest.Server) int {
	b.Helper()
	return int(info(b, r, "memory", "used_memory"))
}

// usedCPU is the processor time that Redis has taken so far, in seconds.
func usedCPU(b *testing.B, r *redistest.Server) float64 {
	b.Helper()
	return info(b, r, "cpu", "used_cpu_user") + info(b, r, "cpu", "used_cpu_sys")
}

func info(b *testing.B, r *redistest.Server, section, field string) float64 {
	b.Helper()
	text, err := r.Client.Info(b.Context(), section).Result()
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(text, field+":")
	value, _, _ := strings.Cut(rest, "\r\n")
	n, err := strconv.ParseFloat(value, 64)
	if err != nil {
		b.Fatal(err)
	}
	return n
}

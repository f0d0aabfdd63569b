package ratelimiter

import (
	"context"
	"math"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
)

// limiter is a limiter in a Redis of its own, on a clock that the test moves.
func limiter(t *testing.T, window time.Duration) (*redisLimiter, *redistest.Server, *time.Time) {
	t.Helper()
	r := redistest.Start(t)
	l, err := NewRedis("aegis", r.Client, window)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(6_000_000_000, 0)
	rl := l.(*redisLimiter)
	rl.now = func() time.Time { return now }
	rl.at = rl.now
	return rl, r, &now
}

func get(t *testing.T, l RateLimiter, key string) int64 {
	t.Helper()
	n, err := l.Get(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func incr(t *testing.T, l RateLimiter, key string, val int64) int64 {
	t.Helper()
	n, err := l.Incr(t.Context(), key, val)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestCountsByWindow(t *testing.T) {
	t.Parallel()
	l, r, now := limiter(t, time.Minute)
	if n := get(t, l, "ann_RPM_CURRENT"); n != 0 {
		t.Errorf("missing key: %d", n)
	}
	incr(t, l, "ann_RPM_CURRENT", 2)
	if n := incr(t, l, "ann_RPM_CURRENT", 3); n != 5 || get(t, l, "ann_RPM_CURRENT") != 5 {
		t.Errorf("counted %d", n)
	}
	keys := r.Client.Keys(t.Context(), "*").Val()
	if len(keys) != 1 || keys[0] != "aegis:ann_RPM_CURRENT:0" {
		t.Errorf("keys %v", keys)
	}
	if ttl := r.Client.TTL(t.Context(), keys[0]).Val(); ttl <= 0 || ttl > time.Minute {
		t.Errorf("time to live %v", ttl)
	}
	*now = now.Add(59 * time.Second)
	if n := get(t, l, "ann_RPM_CURRENT"); n != 5 {
		t.Errorf("at the window's end: %d", n)
	}
	*now = now.Add(time.Second)
	if n := get(t, l, "ann_RPM_CURRENT"); n != 0 {
		t.Errorf("in the next window: %d", n)
	}
	if n := incr(t, l, "bob", 1); n != 1 {
		t.Errorf("another key: %d", n)
	}
}

// Incr is the only gate: of many at once, exactly the limit are let through.
func TestIncrThenCheck(t *testing.T) {
	t.Parallel()
	l, _, _ := limiter(t, time.Minute)
	const limit = 7
	var passed atomic.Int64
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			n, err := l.Incr(context.Background(), "k", 1)
			if err != nil {
				t.Error(err)
				return
			}
			if n <= limit {
				passed.Add(1)
				return
			}
			if _, err := l.Incr(context.Background(), "k", -1); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	// Those above the limit take themselves back, so a later one may get through in their place.
	if n := get(t, l, "k"); n != passed.Load() || n != limit {
		t.Errorf("%d passed, %d counted, want %d", passed.Load(), n, limit)
	}
}

func TestNeverBelowZeroNorWithoutTTL(t *testing.T) {
	t.Parallel()
	l, r, _ := limiter(t, 0) // a window of a second at least
	if l.window != 1 {
		t.Fatalf("window of %d s", l.window)
	}
	l.window = 60
	if n := incr(t, l, "k", -5); n != 0 || get(t, l, "k") != 0 {
		t.Errorf("refunded to %d", n)
	}
	if n := incr(t, l, "k", 1); n != 1 {
		t.Errorf("then counted %d", n)
	}
	for _, key := range r.Client.Keys(t.Context(), "*").Val() {
		if ttl := r.Client.TTL(t.Context(), key).Val(); ttl < 0 {
			t.Errorf("%s has no time to live", key)
		}
	}
	// Neither counting nor a refund that ends at the floor makes it live longer.
	r.Client.Expire(t.Context(), l.counter("k", l.now().Unix()/60), 30*time.Second)
	incr(t, l, "k", 1)
	incr(t, l, "k", -5)
	incr(t, l, "k", 1)
	if ttl := r.Client.TTL(t.Context(), l.counter("k", l.now().Unix()/60)).Val(); ttl <= 0 || ttl > 30*time.Second {
		t.Errorf("lives %v more, of 30 s", ttl)
	}
	incr(t, l, "k", math.MaxInt64-1)
	if _, err := l.Incr(t.Context(), "k", 1); err == nil {
		t.Error("counted beyond the greatest integer")
	}
	r.Client.Set(t.Context(), "aegis:k", 42, 0)
	if n, err := l.GetLimit(t.Context(), "k"); err != nil || n != 42 {
		t.Errorf("limit %d, %v", n, err)
	}
	if n, err := l.GetLimit(t.Context(), "none"); err != nil || n != 0 {
		t.Errorf("no limit: %d, %v", n, err)
	}
	r.Client.ScriptFlush(t.Context())
	incr(t, l, "other", 1)
	r.Kill(t)
	if _, err := l.Incr(t.Context(), "k", 1); err == nil {
		t.Error("counted without a server")
	}
	if _, err := l.Get(t.Context(), "k"); err == nil {
		t.Error("read without a server")
	}
}

// Both implementations that count keep the same promises, on windows of a minute.
func TestCounters(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(t *testing.T) (Counter, *time.Time){
		"redis": func(t *testing.T) (Counter, *time.Time) {
			l, _, now := limiter(t, time.Minute)
			return l, now
		},
		"memory": func(*testing.T) (Counter, *time.Time) {
			now := time.Unix(6_000_000_000, 0)
			return NewMemory(time.Minute, func() time.Time { return now }), &now
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, now := start(t)
			want := func(what string, c RateLimiter, key string, n int64) {
				t.Helper()
				if got := get(t, c, key); got != n {
					t.Errorf("%s: %d, want %d", what, got, n)
				}
			}
			first := l.At(*now)
			all, err := l.IncrAll(t.Context(), Count{"a", 5}, Count{"b", 7}, Count{"a", -1}, Count{"c", -3})
			if diff := cmp.Diff([]int64{5, 7, 4, 0}, all); diff != "" || err != nil {
				t.Errorf("counted together: %v %s", err, diff)
			}
			if none, err := l.IncrAll(t.Context()); len(none) != 0 || err != nil {
				t.Errorf("nothing counted: %v, %v", none, err)
			}

			*now = now.Add(time.Minute)
			want("a new window", l, "a", 0)
			incr(t, l, "a", 2)
			if n := incr(t, first, "a", -3); n != 1 {
				t.Errorf("refunded to %d", n)
			}
			if n := incr(t, first, "a", -3); n != 0 {
				t.Errorf("refunded below zero: %d", n)
			}
			want("the window after the refund of another", l, "a", 2)

			ahead := l.At(now.Add(10 * time.Minute))
			incr(t, ahead, "a", 40)
			want("a later window from here", l, "a", 2)
			want("a later window", ahead, "a", 40)

			*now = now.Add(time.Minute)
			if n := incr(t, first, "b", -1); n != 0 {
				t.Errorf("a window long gone: %d", n)
			}
			want("a window long gone", first, "b", 0)
			*now = now.Add(9 * time.Minute)
			want("once it has come", l, "a", 40)

			// 64 windows on the bins come round: a refund of the first window must not lower this one's counter.
			*now = time.Unix(6_000_000_000, 0).Add(bins * time.Minute)
			incr(t, l, "d", 9)
			incr(t, first, "d", -5)
			want("in the same bin", l, "d", 9)
		})
	}
}

// Scripts are told to a server that has forgotten them once, whether one or several count.
func TestUnknownScript(t *testing.T) {
	t.Parallel()
	l, r, _ := limiter(t, time.Minute)
	for n := range int64(3) {
		r.Client.ScriptFlush(t.Context())
		all, err := l.IncrAll(t.Context(), Count{"a", 1}, Count{"b", 2})
		if diff := cmp.Diff([]int64{n + 1, 2 * (n + 1)}, all); diff != "" || err != nil {
			t.Errorf("%v %s", err, diff)
		}
	}
}

// A counter of a later window lives until that window has ended.
func TestLaterWindowsLiveOn(t *testing.T) {
	t.Parallel()
	l, r, now := limiter(t, time.Minute)
	*now = now.Add(20 * time.Second)
	incr(t, l.At(now.Add(3*time.Minute)), "k", 1)
	if ttl := r.Client.TTL(t.Context(), "aegis:k:3").Val(); ttl < 190*time.Second || ttl > 220*time.Second {
		t.Errorf("lives %v, want 160 s to the window and 60 of it", ttl)
	}
}

// What no counter fits into is counted alone, so that memory stays bounded.
func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	now := time.Unix(6_000_000_000, 0)
	l := NewMemory(time.Minute, func() time.Time { return now })
	for i := range maxKeys {
		incr(t, l, strconv.Itoa(i), 1)
	}
	if n := incr(t, l, "late", 1) + incr(t, l, "late", 1); n != 2 || get(t, l, "late") != 0 {
		t.Errorf("beyond the bound: %d", n)
	}
	if n := incr(t, l, "7", 1); n != 2 {
		t.Errorf("a known key: %d", n)
	}
	now = now.Add(2 * time.Minute)
	incr(t, l, "late", 1)
	if windows := l.(memory).windows; len(windows) != 1 {
		t.Errorf("%d windows are kept", len(windows))
	}
}

func TestNoop(t *testing.T) {
	t.Parallel()
	l := NewNoop()
	limit, err := l.GetLimit(t.Context(), "k")
	if all, err := l.At(time.Now()).IncrAll(t.Context(), Count{"k", 5}, Count{"l", 5}); len(all) != 2 || all[0] != 0 || err != nil {
		t.Errorf("counts %v, %v", all, err)
	}
	if n := incr(t, l, "k", 5); n != 0 || get(t, l, "k") != 0 || err != nil || limit != math.MaxInt64 {
		t.Errorf("counts %d, limit %d, %v", n, limit, err)
	}
}

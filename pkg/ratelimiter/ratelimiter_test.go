package ratelimiter

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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

func TestNoop(t *testing.T) {
	t.Parallel()
	l := NewNoop()
	limit, err := l.GetLimit(t.Context(), "k")
	if n := incr(t, l, "k", 5); n != 0 || get(t, l, "k") != 0 || err != nil || limit != math.MaxInt64 {
		t.Errorf("counts %d, limit %d, %v", n, limit, err)
	}
}

package ratelimiter

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/aegisrate/aegisrate/lua"
)

// bins is how many windows a counter's keys cycle through. A key lives for one window after it
// is made, so a bin is long empty when it comes round again.
const bins = 64

// RateLimiter counts by key in windows of one length.
type RateLimiter interface {
	// Get is the counter of key in the current window; 0 where there is none.
	Get(ctx context.Context, key string) (int64, error)
	// GetLimit is the limit kept for key; 0 where there is none.
	GetLimit(ctx context.Context, key string) (int64, error)
	// Incr adds val, which may be negative, to the counter of key in the current window, and
	// returns the result. It is one atomic call. A counter never falls below zero. After an
	// error it may or may not have counted.
	Incr(ctx context.Context, key string, val int64) (int64, error)
}

type redisLimiter struct {
	name   string
	client redis.UniversalClient
	window int64 // seconds
	now    func() time.Time
	text   string
	sha    string
}

// NewRedis returns a RateLimiter in Redis. Its counters' keys begin with name, so limiters of different
// names never meet. A window below a second is one second, and fractions of a second are cut off.
func NewRedis(name string, client redis.UniversalClient, window time.Duration) (RateLimiter, error) {
	text, err := lua.Script("incr")
	if err != nil {
		return nil, err
	}
	sum := sha1.Sum([]byte(text))
	return &redisLimiter{
		name:   name,
		client: client,
		window: max(1, int64(window/time.Second)),
		now:    time.Now,
		text:   text,
		sha:    hex.EncodeToString(sum[:]),
	}, nil
}

// counter is the key of key's counter in the current window.
func (r *redisLimiter) counter(key string) string {
	bin := r.now().Unix() / r.window % bins
	return r.name + ":" + key + ":" + strconv.FormatInt(bin, 10)
}

func (r *redisLimiter) Get(ctx context.Context, key string) (int64, error) {
	return r.read(ctx, r.counter(key))
}

func (r *redisLimiter) GetLimit(ctx context.Context, key string) (int64, error) {
	return r.read(ctx, r.name+":"+key)
}

func (r *redisLimiter) read(ctx context.Context, key string) (int64, error) {
	n, err := r.client.Get(ctx, key).Int64()
	if errors.Is(err, redis.Nil) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("ratelimiter: get %s: %w", key, err)
	}
	return n, nil
}

// once is a command that no client repeats by itself: it may have counted.
type once struct{ *redis.IntCmd }

func (once) NoRetry() bool { return true }

func (r *redisLimiter) Incr(ctx context.Context, key string, val int64) (int64, error) {
	counter := r.counter(key)
	run := func(command, script string) (int64, error) {
		cmd := once{redis.NewIntCmd(ctx, command, script, 1, counter, val, r.window)}
		cmd.SetFirstKeyPos(3)
		if err := r.client.Process(ctx, cmd); err != nil {
			return 0, err
		}
		return cmd.Val(), nil
	}
	n, err := run("evalsha", r.sha)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		n, err = run("eval", r.text)
	}
	if err != nil {
		return 0, fmt.Errorf("ratelimiter: incr %s: %w", counter, err)
	}
	return n, nil
}

type noop struct{}

// NewNoop returns a RateLimiter that limits nothing: it counts nothing, and its limits are as great as they get.
func NewNoop() RateLimiter { return noop{} }

func (noop) Get(context.Context, string) (int64, error) { return 0, nil }

func (noop) GetLimit(context.Context, string) (int64, error) { return math.MaxInt64, nil }

func (noop) Incr(context.Context, string, int64) (int64, error) { return 0, nil }

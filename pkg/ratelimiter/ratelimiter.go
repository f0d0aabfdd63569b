package ratelimiter

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync"
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

// Count is what to add to the counter of a key.
type Count struct {
	Key string
	Val int64
}

// Counter is a RateLimiter that counts several keys at once, and in other windows than the current one.
type Counter interface {
	RateLimiter
	// IncrAll is Incr for each of counts, in one round trip; the results are in their order. Each is
	// atomic, all together are not: after an error any of them may have counted.
	IncrAll(ctx context.Context, counts ...Count) ([]int64, error)
	// At gives the same counters with the clock standing at t, so that a refund lands in the
	// window that was charged. A counter of a later window lives until that window's end. One of a
	// window that ended a whole window ago has expired: it is 0, and what is added to it is dropped.
	At(t time.Time) Counter
}

type redisLimiter struct {
	name   string
	client redis.UniversalClient
	window int64 // seconds
	now    func() time.Time
	at     func() time.Time // what tells the window; now, unless At says otherwise
	text   string
	sha    string
}

// NewRedis returns a Counter in Redis. Its counters' keys begin with name, so limiters of different
// names never meet. A window below a second is one second, and fractions of a second are cut off.
func NewRedis(name string, client redis.UniversalClient, window time.Duration) (Counter, error) {
	text, err := lua.Script("incr")
	if err != nil {
		return nil, err
	}
	sum := sha1.Sum([]byte(text))
	return &redisLimiter{
		name:   name,
		client: client,
		window: seconds(window),
		now:    time.Now,
		at:     time.Now,
		text:   text,
		sha:    hex.EncodeToString(sum[:]),
	}, nil
}

func seconds(window time.Duration) int64 { return max(1, int64(window/time.Second)) }

func (r *redisLimiter) At(t time.Time) Counter {
	at := *r
	at.at = func() time.Time { return t }
	return &at
}

// counter is the key of key's counter in the window numbered index.
func (r *redisLimiter) counter(key string, index int64) string {
	return r.name + ":" + key + ":" + strconv.FormatInt(index%bins, 10)
}

// place is the number of the window, and for how long its counter is to live, in seconds: 0 where it has expired.
func (r *redisLimiter) place() (index, ttl int64) {
	index = r.at().Unix() / r.window
	switch ahead := index*r.window - r.now().Unix(); {
	case ahead > 0:
		return index, r.window + ahead
	case ahead <= -2*r.window:
		return index, 0 // its bin may be another window's by now
	default:
		return index, r.window
	}
}

func (r *redisLimiter) Get(ctx context.Context, key string) (int64, error) {
	index, ttl := r.place()
	if ttl == 0 {
		return 0, nil
	}
	return r.read(ctx, r.counter(key, index))
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

func (r *redisLimiter) Incr(ctx context.Context, key string, val int64) (int64, error) {
	results, err := r.IncrAll(ctx, Count{key, val})
	if err != nil {
		return 0, err
	}
	return results[0], nil
}

func (r *redisLimiter) IncrAll(ctx context.Context, counts ...Count) ([]int64, error) {
	results := make([]int64, len(counts))
	index, ttl := r.place()
	if ttl == 0 || len(counts) == 0 {
		return results, nil
	}
	keys := make([]string, len(counts))
	all := make([]int, len(counts))
	for i, c := range counts {
		keys[i], all[i] = r.counter(c.Key, index), i
	}
	// run counts those of the given indices and returns the ones whose script Redis did not know.
	run := func(which []int, command, script string) (unknown []int, err error) {
		cmds := make([]once, len(which))
		for n, i := range which {
			cmds[n] = once{redis.NewIntCmd(ctx, command, script, 1, keys[i], counts[i].Val, ttl)}
			cmds[n].SetFirstKeyPos(3)
		}
		r.send(ctx, cmds)
		for n, i := range which {
			results[i] = cmds[n].Val()
			switch e := cmds[n].Err(); {
			case redis.HasErrorPrefix(e, "NOSCRIPT"):
				unknown = append(unknown, i)
			case e != nil:
				err = errors.Join(err, fmt.Errorf("ratelimiter: incr %s: %w", keys[i], e))
			}
		}
		return unknown, err
	}
	unknown, err := run(all, "evalsha", r.sha)
	if len(unknown) > 0 {
		unknown, again := run(unknown, "eval", r.text)
		err = errors.Join(err, again)
		if len(unknown) > 0 {
			err = errors.Join(err, errors.New("ratelimiter: the server answers NOSCRIPT to EVAL"))
		}
	}
	return results, err
}

// once is a command that no client repeats by itself: it may have counted.
type once struct{ *redis.IntCmd }

func (once) NoRetry() bool { return true }

// send runs commands, several in a pipeline. Errors are the commands' own.
func (r *redisLimiter) send(ctx context.Context, cmds []once) {
	if len(cmds) == 1 {
		_ = r.client.Process(ctx, cmds[0])
		return
	}
	p := r.client.Pipeline()
	for _, cmd := range cmds {
		_ = p.Process(ctx, cmd)
	}
	_, _ = p.Exec(ctx)
}

// maxKeys bounds the counters of one window in memory; keys beyond it count from 0 each time.
const maxKeys = 100_000

type memory struct {
	*counted
	at func() time.Time
}

// counted are the counters of a memory limiter, by window and key.
type counted struct {
	window int64 // seconds
	now    func() time.Time

	mu      sync.Mutex
	windows map[int64]map[string]int64
}

// NewMemory returns a Counter in this process's memory, on the clock now: for when Redis is away.
// Its counters keep no limits; GetLimit is 0.
func NewMemory(window time.Duration, now func() time.Time) Counter {
	return memory{&counted{window: seconds(window), now: now, windows: make(map[int64]map[string]int64)}, now}
}

func (m memory) At(t time.Time) Counter { return memory{m.counted, func() time.Time { return t }} }

func (m memory) Get(_ context.Context, key string) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.windows[m.at().Unix()/m.window][key], nil
}

func (memory) GetLimit(context.Context, string) (int64, error) { return 0, nil }

func (m memory) Incr(ctx context.Context, key string, val int64) (int64, error) {
	results, err := m.IncrAll(ctx, Count{key, val})
	return results[0], err
}

func (m memory) IncrAll(_ context.Context, counts ...Count) ([]int64, error) {
	results := make([]int64, len(counts))
	m.mu.Lock()
	defer m.mu.Unlock()
	current, index := m.now().Unix()/m.window, m.at().Unix()/m.window
	for w := range m.windows {
		if w < current-1 {
			delete(m.windows, w)
		}
	}
	if index < current-1 {
		return results, nil
	}
	keys := m.windows[index]
	if keys == nil {
		keys = make(map[string]int64)
		m.windows[index] = keys
	}
	for i, c := range counts {
		results[i] = max(0, keys[c.Key]+c.Val)
		if _, known := keys[c.Key]; known || len(keys) < maxKeys {
			keys[c.Key] = results[i]
		}
	}
	return results, nil
}

type noop struct{}

// NewNoop returns a Counter that limits nothing: it counts nothing, and its limits are as great as they get.
func NewNoop() Counter { return noop{} }

func (noop) Get(context.Context, string) (int64, error) { return 0, nil }

func (noop) GetLimit(context.Context, string) (int64, error) { return math.MaxInt64, nil }

func (noop) Incr(context.Context, string, int64) (int64, error) { return 0, nil }

func (noop) IncrAll(_ context.Context, counts ...Count) ([]int64, error) {
	return make([]int64, len(counts)), nil
}

func (n noop) At(time.Time) Counter { return n }

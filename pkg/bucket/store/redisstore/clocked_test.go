package redisstore

import (
	"context"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/aegisrate/aegisrate/lua"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/storetest"
)

// clockKey holds the time that clocked scripts see. It would be in another slot than the
// buckets, so a clocked store can't be a cluster's.
const clockKey = "test:clock"

// leastLifetime is the least that a bucket is kept, in microseconds.
const leastLifetime = 120e6

// clocked is a Store on a clock that the test sets. Redis' own clock is behind it, so clocked
// expires keys itself.
type clocked struct {
	*Store
	t testing.TB
	// touched are the keys of all calls so far; none of them expires before due.
	touched  map[string]bool
	now, due int64
}

// onRedis is a store on a set clock, in a Redis of its own.
func onRedis(t testing.TB) storetest.Clocked {
	t.Helper()
	c := &clocked{Store: open(t, Options{Addrs: []string{redistest.Start(t).Addr}}), t: t, touched: map[string]bool{}}
	for _, sc := range []*script{&c.check, &c.giveBack, &c.settle, &c.begin, &c.adjust} {
		text := strings.Replace(sc.text, lua.Clock, "local function clock() return tonumber(redis.call('GET', '"+clockKey+"')) end\n", 1)
		if text == sc.text {
			t.Fatal("the script has no clock to replace")
		}
		*sc = newScript(text)
	}
	c.SetClock(storetest.Epoch)
	return c
}

func (c *clocked) SetClock(now int64) {
	ctx := context.Background()
	c.now = now
	expires := map[string]*redis.DurationCmd{}
	_, err := c.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		p.Set(ctx, clockKey, now, 0)
		if now < c.due {
			return nil
		}
		for key := range c.touched {
			expires[key] = p.PExpireTime(ctx, key)
		}
		return nil
	})
	if err != nil {
		c.t.Fatal(err)
	}
	if now < c.due {
		return
	}
	c.due = now + leastLifetime
	for key, cmd := range expires {
		switch at := cmd.Val().Microseconds(); {
		case cmd.Val() == -1:
			c.t.Errorf("%s has no time to live", key)
		case cmd.Val() == -2: // no such key
			delete(c.touched, key)
		case at <= now:
			c.client.Del(ctx, key)
			delete(c.touched, key)
		default:
			c.due = min(c.due, at)
		}
	}
}

func (c *clocked) Check(ctx context.Context, check store.Check) (store.Decision, error) {
	c.touch(c.checkCall([]*ask{{check: check}}).keys)
	return c.Store.Check(ctx, check)
}

// CheckAll implements storetest.Batcher.
func (c *clocked) CheckAll(checks []store.Check) ([]store.Decision, error) {
	asks := make([]*ask, len(checks))
	for i, check := range checks {
		asks[i] = &ask{check: check}
	}
	c.touch(c.checkCall(asks).keys)
	c.decide(asks)
	decisions := make([]store.Decision, len(asks))
	for i, a := range asks {
		if a.err != nil {
			return nil, a.err
		}
		decisions[i] = a.decision
	}
	return decisions, nil
}

func (c *clocked) Settle(ctx context.Context, st store.Settlement) (store.Settled, error) {
	keys, _ := settleCall(st)
	c.touch(keys[1:])
	return c.Store.Settle(ctx, st)
}

func (c *clocked) Adjust(ctx context.Context, a store.Adjustment) (store.ItemState, error) {
	keys, _ := adjustCall(a)
	c.touch(keys)
	return c.Store.Adjust(ctx, a)
}

func (c *clocked) touch(keys []string) {
	for _, key := range keys {
		c.touched[key] = true
	}
	c.due = min(c.due, c.now+leastLifetime)
}

func (c *clocked) Stored(ids ...storetest.ID) []storetest.Hash {
	c.t.Helper()
	ctx := context.Background()
	fields := make([]*redis.MapStringStringCmd, len(ids))
	expires := make([]*redis.DurationCmd, len(ids))
	_, err := c.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, id := range ids {
			key := bucketKey(id.Kind, id.Scope, id.Client)
			fields[i], expires[i] = p.HGetAll(ctx, key), p.PExpireTime(ctx, key)
		}
		return nil
	})
	if err != nil {
		c.t.Fatal(err)
	}
	out := make([]storetest.Hash, len(ids))
	for i := range ids {
		if len(fields[i].Val()) > 0 {
			out[i] = storetest.Hash{Fields: fields[i].Val(), Expires: expires[i].Val().Milliseconds()}
		}
	}
	return out
}

func TestScenarios(t *testing.T) {
	storetest.Scenarios(t, "../testdata", onRedis)
}

package redisstore

import (
	"context"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/aegisrate/aegisrate/lua"
	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/storetest"
)

// clockKey holds the time that clocked scripts see. It would be in another slot than the
// buckets, so a clocked store can't be a cluster's.
const clockKey = "test:clock"

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
	for _, sc := range []*script{&c.check, &c.settle, &c.begin} {
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
	c.now = now
	if err := c.client.Set(context.Background(), clockKey, now, 0).Err(); err != nil {
		c.t.Fatal(err)
	}
	if now < c.due {
		return
	}
	c.due = now + 120e6 // what is written from now on lives that long at least
	for key := range c.touched {
		expires, err := c.client.PExpireTime(context.Background(), key).Result()
		switch at := expires.Microseconds(); {
		case err != nil:
			c.t.Fatal(err)
		case expires == -1:
			c.t.Errorf("%s has no time to live", key)
		case expires == -2: // no such key
			delete(c.touched, key)
		case at <= now:
			c.client.Del(context.Background(), key)
			delete(c.touched, key)
		default:
			c.due = min(c.due, at)
		}
	}
}

func (c *clocked) Check(ctx context.Context, check store.Check) (store.Decision, error) {
	keys, _ := checkCall(check)
	c.touch(keys)
	return c.Store.Check(ctx, check)
}

func (c *clocked) Settle(ctx context.Context, st store.Settlement) (store.Settled, error) {
	keys, _ := settleCall(st)
	c.touch(keys[1:])
	return c.Store.Settle(ctx, st)
}

func (c *clocked) touch(keys []string) {
	for _, key := range keys {
		c.touched[key] = true
	}
	c.due = min(c.due, c.now+120e6)
}

func (c *clocked) Stored(kind bucket.Kind, scope, client string) (map[string]string, int64) {
	c.t.Helper()
	key := bucketKey(kind, scope, client)
	var fields *redis.MapStringStringCmd
	var expires *redis.DurationCmd
	_, err := c.client.Pipelined(context.Background(), func(p redis.Pipeliner) error {
		fields, expires = p.HGetAll(context.Background(), key), p.PExpireTime(context.Background(), key)
		return nil
	})
	if err != nil {
		c.t.Fatal(err)
	}
	if len(fields.Val()) == 0 {
		return nil, 0
	}
	return fields.Val(), expires.Val().Milliseconds()
}

func TestScenarios(t *testing.T) {
	storetest.Scenarios(t, "../testdata", onRedis)
}

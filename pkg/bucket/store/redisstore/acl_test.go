package redisstore

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
)

// aclServer is a Redis with the users of the compose stack; user is also the password of each.
func aclServer(t *testing.T) *redistest.Server {
	t.Helper()
	acl, err := os.ReadFile("../../../../deploy/redis-users.acl")
	if err != nil {
		t.Fatal(err)
	}
	text := string(acl)
	for _, user := range []string{"edge", "settler", "controlplane"} {
		text = strings.ReplaceAll(text, "$AEGIS_REDIS_"+strings.ToUpper(user)+"_PASSWORD", user)
	}
	file := filepath.Join(t.TempDir(), "users.acl")
	// The test's own client is the administrator.
	if err := os.WriteFile(file, []byte("user default on nopass ~* &* +@all\n"+text), 0o600); err != nil {
		t.Fatal(err)
	}
	return redistest.Start(t, "--aclfile", file)
}

// TestRedisUsers: each service does its own work with its user, and nothing else.
func TestRedisUsers(t *testing.T) {
	t.Parallel()
	s := aclServer(t)
	as := func(user string) *Store {
		return open(t, Options{Addrs: []string{s.Addr}, Username: user, Password: user})
	}
	edge, settler, control := as("edge"), as("settler"), as("controlplane")
	ctx := t.Context()
	spec := bucket.Effective(bucket.Limit{Kind: bucket.TokenBucket, Capacity: 10, Rate: bucket.One, Grace: true}, bucket.One)
	sliding := bucket.Effective(bucket.Limit{Kind: bucket.SlidingWindow, Capacity: 10, Window: 60}, bucket.One)
	daily := bucket.Effective(bucket.Limit{Kind: bucket.DailyQuota, Capacity: 10}, bucket.One)
	check := store.Check{Client: "c", Cost: bucket.One, Limits: []store.Limit{{Scope: "r", Spec: spec}, {Scope: "w", Spec: sliding}, {Scope: bucket.ScopeDay, Spec: daily}}}
	shard := store.ShardOf("c")
	settle := store.Settlement{Shard: shard, Stream: "s", Seq: 1, Boot: "b", N: 1, Items: []store.Item{{Client: "c", Scope: "r", Spec: spec, Delta: bucket.One}}}
	adjust := store.Adjustment{Client: "c", Limit: store.Limit{Scope: "r", Spec: spec}, Reset: true}

	work := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused := func(what string, err error) {
		t.Helper()
		if err == nil || !deniedBy(err) {
			t.Errorf("%s: got %v, want a refusal", what, err)
		}
	}
	_, err := edge.Check(ctx, check)
	work("the edge checks", err)
	_, err = settler.Begin(ctx, shard, "s", 0)
	work("the settler begins", err)
	_, err = settler.Settle(ctx, settle)
	work("the settler settles", err)
	_, err = settler.Meta(ctx, shard)
	work("the settler reads its cursor", err)
	peek := check
	peek.Cost = 0
	_, err = control.Check(ctx, peek)
	work("the controlplane looks", err)
	_, err = control.Adjust(ctx, adjust)
	work("the controlplane resets", err)
	_, err = control.Inspect(ctx)
	work("the controlplane inspects", err)
	for name, st := range map[string]*Store{"edge": edge, "settler": settler, "controlplane": control} {
		work(name+" pings", st.Ping(ctx))
	}

	// Settlement is the settler's alone: who could move its cursor could have a debt forgotten.
	settle.Seq, settle.N, settle.Prev = 2, 2, 1
	for name, st := range map[string]*Store{"edge": edge, "controlplane": control} {
		_, err = st.Settle(ctx, settle)
		refused(name+" settles", err)
		_, err = st.Begin(ctx, shard, "other", 99)
		refused(name+" moves a cursor", err)
		_, err = st.Meta(ctx, shard)
		refused(name+" reads a cursor", err)
	}
	if m, err := settler.Meta(ctx, shard); err != nil || m.Cursor != 1 || m.Stream != "s" {
		t.Errorf("the cursor is %+v, %v", m, err)
	}

	for _, user := range []string{"edge", "settler", "controlplane"} {
		c := redis.NewClient(&redis.Options{Addr: s.Addr, Username: user, Password: user})
		t.Cleanup(func() { c.Close() })
		for _, line := range [][]any{
			{"FLUSHALL"}, {"KEYS", "*"}, {"CONFIG", "GET", "*"}, {"CONFIG", "SET", "maxmemory", "1"}, {"ACL", "LIST"}, {"SHUTDOWN"},
			{"SCRIPT", "FLUSH"}, {"REPLICAOF", "NO", "ONE"}, {"MONITOR"}, {"CLIENT", "LIST"}, {"SET", "foreign", "1"},
			{"HSET", "foreign", "a", "1"}, {"DEL", "foreign"}, {"PUBLISH", "x", "y"}, {"MODULE", "LIST"}, {"SAVE"},
			{"EVAL", "return redis.call('SET', 'foreign', 1)", "0"}, {"EVAL", "return redis.call('FLUSHALL')", "0"},
			{"EVAL", "return redis.call('HSET', KEYS[1], 'a', 1)", "1", "foreign"},
		} {
			err := c.Do(ctx, line...).Err()
			if err == nil || !deniedBy(err) {
				t.Errorf("%s, %v: got %v, want a refusal", user, line, err)
			}
		}
	}
	// Healthwatch has no business with Redis, and no user.
	for _, o := range []redis.Options{{Username: "healthwatch", Password: "healthwatch"}, {Username: "edge", Password: "settler"}} {
		o.Addr = s.Addr
		c := redis.NewClient(&o)
		t.Cleanup(func() { c.Close() })
		if err := c.Ping(context.Background()).Err(); err == nil || !strings.Contains(err.Error(), "WRONGPASS") {
			t.Errorf("%s: got %v", o.Username, err)
		}
	}
}

// deniedBy reports whether Redis says that the user may not: by itself, or of a command in a script.
func deniedBy(err error) bool {
	for _, text := range []string{"NOPERM", "ACL failure", "can't run this command", "can't access", "No permissions"} {
		if strings.Contains(err.Error(), text) {
			return true
		}
	}
	return false
}

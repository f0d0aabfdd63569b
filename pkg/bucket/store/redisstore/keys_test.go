package redisstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

func TestKeys(t *testing.T) {
	t.Parallel()
	tag := fmt.Sprintf("{%d}", store.ShardOf("ip:10.0.0.1"))
	for want, got := range map[string]string{
		"ratelimit:tb:" + tag + ":fast:ip:10.0.0.1":  bucketKey(bucket.TokenBucket, "fast", "ip:10.0.0.1"),
		"ratelimit:sw:" + tag + ":@plan:ip:10.0.0.1": bucketKey(bucket.SlidingWindow, bucket.ScopePlan, "ip:10.0.0.1"),
		"ratelimit:day:" + tag + ":ip:10.0.0.1":      bucketKey(bucket.DailyQuota, bucket.ScopeDay, "ip:10.0.0.1"),
		"ratelimit:meta:{7}":                         metaKey(7),
		"a%20b%7B%7D%0A":                             keyPart("a b{}\n", ""),
		"a%3Ab":                                      keyPart("a:b", ""),
		"a%253Ab":                                    keyPart("a%3Ab", ""),
		"":                                           keyPart("", ""),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// Case 27: distinct clients and scopes have distinct keys, bounded, in the client's slot.
func TestKeysAreDistinct(t *testing.T) {
	t.Parallel()
	part := rapid.OneOf(rapid.StringMatching(`[a:{}% ~]{0,4}`), rapid.String(), rapid.StringN(60, 200, -1))
	rapid.Check(t, func(t *rapid.T) {
		scope, client := part.Draw(t, "scope"), part.Draw(t, "client")
		otherScope, otherClient := part.Draw(t, "other scope"), part.Draw(t, "other client")
		a, b := bucketKey(bucket.TokenBucket, scope, client), bucketKey(bucket.TokenBucket, otherScope, otherClient)
		if (a == b) != (scope == otherScope && client == otherClient) {
			t.Fatalf("%q", a)
		}
		if len(a) > len("ratelimit:tb:{63}::")+2*maxPart {
			t.Fatalf("%d bytes", len(a))
		}
		tag, _, _ := strings.Cut(a[strings.Index(a, "{"):], "}")
		if tag != fmt.Sprintf("{%d", store.ShardOf(client)) {
			t.Fatalf("hash tag of %q", a)
		}
	})
}

type reply string

func (r reply) Error() string { return string(r) }
func (reply) RedisError()     {}

// What an error says of the state it leaves.
func TestStoreErrors(t *testing.T) {
	t.Parallel()
	dial := &net.OpError{Op: "dial", Err: errors.New("refused")}
	read := &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}
	for _, tc := range []struct{ err, want error }{
		{reply("OOM command not allowed"), store.ErrFull},
		{reply("OOM command not allowed"), store.ErrUnavailable},
		{reply("READONLY You can't write"), store.ErrUnavailable},
		{reply("LOADING Redis is loading"), store.ErrUnavailable},
		{reply("MASTERDOWN Link with MASTER is down"), store.ErrUnavailable},
		{reply("CLUSTERDOWN Hash slot not served"), store.ErrUnavailable},
		{reply("TRYAGAIN Multiple keys"), store.ErrUnavailable},
		{reply("NOAUTH Authentication required."), store.ErrUnavailable},
		{reply("STATE 2 tokens: x"), store.ErrState},
		{reply("WRONGTYPE Operation"), store.ErrState},
		{reply("FORMAT 9"), store.ErrState},
		{reply("ERR user_script:1: bug"), store.ErrUnknown},
		{dial, store.ErrUnavailable},
		{fmt.Errorf("wrapped: %w", dial), store.ErrUnavailable},
		{redis.ErrPoolTimeout, store.ErrUnavailable},
		{redis.ErrClosed, store.ErrUnavailable},
		{read, store.ErrUnknown},
		{io.EOF, store.ErrUnknown},
		{context.DeadlineExceeded, store.ErrUnknown},
	} {
		if got := storeError(tc.err); !errors.Is(got, tc.want) {
			t.Errorf("%v: %v, want %v", tc.err, got, tc.want)
		}
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]Options{
		"no address":           {},
		"empty address":        {Addrs: []string{""}},
		"two ways":             {Addrs: []string{"a:1"}, Cluster: true, Master: "m"},
		"several single ones":  {Addrs: []string{"a:1", "b:1"}},
		"negative pool":        {Addrs: []string{"a:1"}, PoolSize: -1},
		"password and file":    {Addrs: []string{"a:1"}, Password: "x", PasswordFile: "y"},
		"password file absent": {Addrs: []string{"a:1"}, PasswordFile: "/nonexistent/password"},
	} {
		if s, err := New(o); err == nil {
			s.Close()
			t.Errorf("%s is accepted", name)
		}
	}
}

package redisstore

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/storetest"
)

func TestConformanceCluster(t *testing.T) {
	c := redistest.StartCluster(t, 3)
	var turn sync.Mutex // the tests of the suite share the cluster, one after the other
	t.Run("suite", func(t *testing.T) {
		storetest.Run(t, func(t *testing.T) store.Store {
			turn.Lock()
			t.Cleanup(turn.Unlock)
			c.Flush(t)
			return open(t, Options{Addrs: c.Addrs(), Cluster: true})
		})
	})
}

func TestConformanceSentinel(t *testing.T) {
	s := redistest.StartSentinel(t)
	var turn sync.Mutex
	t.Run("suite", func(t *testing.T) {
		storetest.Run(t, func(t *testing.T) store.Store {
			turn.Lock()
			t.Cleanup(turn.Unlock)
			if err := s.Master.Client.FlushAll(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
			return open(t, Options{Addrs: s.Addrs(), Master: redistest.MasterName})
		})
	})
}

// A client's slot moves to another node and on, under load: every check is decided, each once.
func TestReshardUnderLoad(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3)
	s := open(t, Options{Addrs: c.Addrs(), Cluster: true})
	const clients = 40
	spec := still(100_000)
	owner, slot := c.Owner(t, metaKey(0))
	var names []string
	for i := 0; len(names) < clients; i++ {
		if name := strconv.Itoa(i); len(names)%2 == 1 || store.ShardOf(name) == 0 {
			names = append(names, name)
		}
	}
	stop := load(t, s, 8, func(i int) string { return names[i%clients] }, spec)
	for range 4 {
		next := (owner + 1) % len(c.Nodes)
		c.MoveSlot(t, slot, owner, next)
		owner = next
	}
	green, failed := stop()
	if len(failed) > 0 {
		t.Errorf("%d calls failed, the first: %v", len(failed), failed[0])
	}
	var changes int64
	for _, name := range names {
		d, err := s.Check(t.Context(), store.Check{Client: name, Limits: []store.Limit{{Scope: "r", Spec: spec}}})
		if err != nil {
			t.Fatal(err)
		}
		changes += d.Limits[0].Seq
	}
	if changes != green || green == 0 {
		t.Errorf("%d checks were green, %d were stored", green, changes)
	}
}

// A part of the cluster that is down fails its own clients only, and the breaker's ping goes on.
func TestClusterNodeDown(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3)
	s := open(t, Options{Addrs: c.Addrs(), Cluster: true})
	down, _ := c.Owner(t, bucketKey(bucket.TokenBucket, "r", "a"))
	other := ""
	for i := 0; other == ""; i++ {
		if at, _ := c.Owner(t, bucketKey(bucket.TokenBucket, "r", strconv.Itoa(i))); at != down {
			other = strconv.Itoa(i)
		}
	}
	if _, err := s.Check(t.Context(), one("a", still(5))); err != nil {
		t.Fatal(err)
	}
	c.Nodes[down].Kill(t)
	if _, err := s.Check(t.Context(), one("a", still(5))); !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUnknown) {
		t.Errorf("a client of the dead node: %v", err)
	}
	if _, err := s.Check(t.Context(), one(other, still(5))); err != nil {
		t.Errorf("another client: %v", err)
	}
	if err := s.Ping(t.Context()); err != nil {
		t.Errorf("ping: %v", err)
	}
}

// A node that stalls holds a call for its timeout, and what it was sent runs once, when it goes on.
func TestClusterStallSendsOnce(t *testing.T) {
	t.Parallel()
	const timeout = 300 * time.Millisecond
	c := redistest.StartCluster(t, 3)
	s, err := New(Options{Addrs: c.Addrs(), Cluster: true, PoolSize: 2, Timeout: timeout, PoolTimeout: timeout, DialTimeout: timeout})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	node, _ := c.Owner(t, bucketKey(bucket.TokenBucket, "r", "a"))
	redistest.Await(t, "a check", func() error {
		_, err := s.Check(t.Context(), one("a", still(100)))
		return err
	})
	before, err := s.Check(t.Context(), one("a", still(100)))
	if err != nil {
		t.Fatal(err)
	}
	c.Nodes[node].Stop(t)
	start := time.Now()
	if _, err := s.Check(t.Context(), one("a", still(100))); !errors.Is(err, store.ErrUnknown) {
		t.Errorf("a stalled node: %v", err)
	}
	if took := time.Since(start); took > 2*timeout {
		t.Errorf("held for %v", took)
	}
	c.Nodes[node].Cont(t)
	redistest.Await(t, "what was sent to run", func() error {
		d, err := s.Check(t.Context(), store.Check{Client: "a", Limits: []store.Limit{{Scope: "r", Spec: still(100)}}})
		if err == nil && d.Limits[0].Seq != before.Limits[0].Seq+1 {
			err = fmt.Errorf("seq %d, want one more than %d", d.Limits[0].Seq, before.Limits[0].Seq)
		}
		return err
	})
}

// The master steps down: the store follows, and nothing is charged on the demoted one.
func TestSentinelFailover(t *testing.T) {
	t.Parallel()
	sn := redistest.StartSentinel(t)
	s := open(t, Options{Addrs: sn.Addrs(), Master: redistest.MasterName})
	spec := still(1000)
	for range 10 {
		if _, err := s.Check(t.Context(), one("c", spec)); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := sn.Master.Client.Do(t.Context(), "wait", 1, 5000).Int(); err != nil || n != 1 {
		t.Fatalf("replicas in step: %d, %v", n, err)
	}
	sn.Failover(t)
	redistest.Await(t, "a check on the new master", func() error {
		_, err := s.Check(t.Context(), one("c", spec))
		return err
	})
	var seen store.Decision
	for range 20 { // over every connection of the pool
		var err error
		if seen, err = s.Check(t.Context(), one("c", spec)); err != nil {
			t.Fatalf("after the failover: %v", err)
		}
	}
	stored, err := sn.Master.Client.HGet(t.Context(), bucketKey(bucket.TokenBucket, "r", "c"), "seq").Int64()
	if err != nil || stored != seen.Limits[0].Seq || stored < 31 {
		t.Errorf("the new master has seq %d (%v), the last decision %d", stored, err, seen.Limits[0].Seq)
	}

	// And when the master dies.
	sn.Master.Kill(t)
	sn.Master, sn.Replica = sn.Replica, sn.Master
	sn.AwaitMaster(t)
	redistest.Await(t, "a check after the master's death", func() error {
		_, err := s.Check(t.Context(), one("c", spec))
		return err
	})
}

package redistest

import (
	"context"
	"fmt"
	"strings"
	"testing"
)

// slots is the number of hash slots of a Redis Cluster.
const slots = 16384

// Cluster is a Redis Cluster of masters only.
type Cluster struct {
	Nodes []*Server
	ids   []string
}

// StartCluster runs a cluster of n masters, each with its share of the slots, until the test
// ends. It needs redis-server on PATH.
func StartCluster(t testing.TB, n int) *Cluster {
	t.Helper()
	needServer(t)
	c := &Cluster{}
	for range n {
		c.Nodes = append(c.Nodes, Start(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "5000"))
	}
	ctx := t.Context()
	for i, node := range c.Nodes {
		id, err := node.Client.ClusterMyID(ctx).Result()
		must(t, "cluster id", err)
		c.ids = append(c.ids, id)
		must(t, "epoch", node.Client.Do(ctx, "cluster", "set-config-epoch", i+1).Err())
		must(t, "slots", node.Client.ClusterAddSlotsRange(ctx, i*slots/n, (i+1)*slots/n-1).Err())
		host, port := node.hostPort(t)
		must(t, "meet", c.Nodes[0].Client.ClusterMeet(ctx, host, port).Err())
	}
	for _, node := range c.Nodes {
		Await(t, "the cluster to form", func() error {
			info, err := node.Client.ClusterInfo(context.Background()).Result()
			if err == nil && !(strings.Contains(info, "cluster_state:ok") && strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d\r", n))) {
				err = fmt.Errorf("not ready: %.120s", info)
			}
			return err
		})
	}
	return c
}

func needServer(t testing.TB) {
	t.Helper()
	if !have("redis-server") {
		t.Fatal("this test needs redis-server on PATH: apt-get install redis-server")
	}
}

func must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// Addrs are the nodes' addresses.
func (c *Cluster) Addrs() []string {
	var out []string
	for _, n := range c.Nodes {
		out = append(out, n.Addr)
	}
	return out
}

// Flush empties every node.
func (c *Cluster) Flush(t testing.TB) {
	t.Helper()
	for _, n := range c.Nodes {
		must(t, "flush", n.Client.FlushAll(t.Context()).Err())
	}
}

// Owner is the index of the node that serves key's slot, and the slot.
func (c *Cluster) Owner(t testing.TB, key string) (node int, slot int64) {
	t.Helper()
	slot, err := c.Nodes[0].Client.ClusterKeySlot(t.Context(), key).Result()
	must(t, "slot", err)
	shards, err := c.Nodes[0].Client.ClusterShards(t.Context()).Result()
	must(t, "shards", err)
	for _, shard := range shards {
		for _, r := range shard.Slots {
			if slot < r.Start || slot > r.End {
				continue
			}
			for i, id := range c.ids {
				if id == shard.Nodes[0].ID { // there are no replicas
					return i, slot
				}
			}
		}
	}
	t.Fatalf("nobody serves slot %d", slot)
	return 0, 0
}

// MoveSlot moves a slot and its keys while the cluster serves, as redis-cli's reshard does.
func (c *Cluster) MoveSlot(t testing.TB, slot int64, from, to int) {
	t.Helper()
	ctx := t.Context()
	source, target := c.Nodes[from].Client, c.Nodes[to].Client
	host, port := c.Nodes[to].hostPort(t)
	must(t, "importing", target.Do(ctx, "cluster", "setslot", slot, "importing", c.ids[from]).Err())
	must(t, "migrating", source.Do(ctx, "cluster", "setslot", slot, "migrating", c.ids[to]).Err())
	for {
		keys, err := source.ClusterGetKeysInSlot(ctx, int(slot), 10).Result()
		must(t, "keys in slot", err)
		if len(keys) == 0 {
			break
		}
		for _, key := range keys {
			must(t, "migrate", source.Do(ctx, "migrate", host, port, key, 0, 5000).Err())
		}
	}
	for _, node := range []int{to, from} {
		must(t, "assign", c.Nodes[node].Client.Do(ctx, "cluster", "setslot", slot, "node", c.ids[to]).Err())
	}
}

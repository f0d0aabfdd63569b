package redisstore

import (
	"cmp"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

// Options says where Redis is and how long to wait for it. Zero values of the sizes and
// timeouts stand for the defaults.
type Options struct {
	// Addrs is one server's host:port, or the sentinels' (with Master), or some of a cluster's nodes' (with Cluster).
	Addrs []string
	// Master is the name under which the sentinels know the master.
	Master string
	// Cluster says that Addrs are nodes of a Redis Cluster.
	Cluster            bool
	Username, Password string
	// SentinelUsername and SentinelPassword are for the sentinels themselves.
	SentinelUsername, SentinelPassword string

	// PoolSize bounds the connections to each node, all of them kept open. Default 16.
	PoolSize int
	// Timeout bounds each read and each write of a call. Default 20 ms.
	Timeout time.Duration
	// PoolTimeout bounds the wait for a free connection. Default 10 ms.
	PoolTimeout time.Duration
	// DialTimeout bounds the opening of a connection. Default 200 ms.
	DialTimeout time.Duration
}

// Validate reports the first option that is missing or contradicts another.
func (o Options) Validate() error {
	switch {
	case len(o.Addrs) == 0 || o.Addrs[0] == "":
		return errors.New("redis: no address: give host:port of a server, of the sentinels or of cluster nodes")
	case o.Cluster && o.Master != "":
		return errors.New("redis: both cluster and a sentinel master are set: choose one")
	case len(o.Addrs) > 1 && !o.Cluster && o.Master == "":
		return errors.New("redis: several addresses: set cluster, or the sentinel master's name")
	case o.PoolSize < 0 || o.Timeout < 0 || o.PoolTimeout < 0 || o.DialTimeout < 0:
		return errors.New("redis: pool size and timeouts must not be negative")
	}
	return nil
}

// dial makes a client with a pool of its own, of poolSize connections to each node. It does not
// connect yet. The client repeats nothing: a debit that timed out may have run.
func (o Options) dial(poolSize int) redis.UniversalClient {
	timeout := cmp.Or(o.Timeout, 20*time.Millisecond)
	u := &redis.UniversalOptions{
		Addrs:                 o.Addrs,
		MasterName:            o.Master,
		Username:              o.Username,
		Password:              o.Password,
		SentinelUsername:      o.SentinelUsername,
		SentinelPassword:      o.SentinelPassword,
		MaxRetries:            -1,
		DialTimeout:           cmp.Or(o.DialTimeout, 200*time.Millisecond),
		DialerRetries:         1,
		ReadTimeout:           timeout,
		WriteTimeout:          timeout,
		ContextTimeoutEnabled: true,
		PoolSize:              poolSize,
		MinIdleConns:          poolSize,
		PoolTimeout:           cmp.Or(o.PoolTimeout, 10*time.Millisecond),
		PipelinePoolSize:      -1, // pipelines use the same bounded pool
	}
	switch {
	case o.Cluster:
		c := u.Cluster()
		c.DisableRoutingPolicies = true // scripts go where their keys are
		return redis.NewClusterClient(c)
	case o.Master != "":
		return redis.NewFailoverClient(u.Failover())
	default:
		return redis.NewClient(u.Simple())
	}
}

package redisstore

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Options says where Redis is and how long to wait for it. Its tags are kong's. Zero
// values of the sizes and timeouts stand for the defaults.
type Options struct {
	// Addrs is one server's host:port, or the sentinels' (with Master), or some of a cluster's nodes' (with Cluster).
	Addrs []string `name:"redis-addr" env:"AEGIS_REDIS_ADDR" default:"127.0.0.1:6379" help:"Redis at host:port; of sentinels or cluster nodes, comma separated."`
	// Master is the name under which the sentinels know the master.
	Master string `name:"redis-sentinel-master" env:"AEGIS_REDIS_SENTINEL_MASTER" help:"Name of the master, where the addresses are sentinels."`
	// Cluster says that Addrs are nodes of a Redis Cluster.
	Cluster  bool   `name:"redis-cluster" env:"AEGIS_REDIS_CLUSTER" help:"The addresses are nodes of a Redis Cluster."`
	Username string `name:"redis-username" env:"AEGIS_REDIS_USERNAME" help:"Redis user."`
	// Password and SentinelPassword are for Secrets to set: flags would show them to everybody on the machine.
	Password     string `kong:"-"`
	PasswordFile string `name:"redis-password-file" env:"AEGIS_REDIS_PASSWORD_FILE" type:"path" help:"File holding the Redis password, read once at the start; or give it as AEGIS_REDIS_PASSWORD."`
	// SentinelUsername and SentinelPassword are for the sentinels themselves.
	SentinelUsername string `name:"redis-sentinel-username" env:"AEGIS_REDIS_SENTINEL_USERNAME" help:"User of the sentinels."`
	SentinelPassword string `kong:"-"`

	// PoolSize bounds the connections to each node, all of them kept open. Default 16.
	PoolSize int `name:"redis-pool-size" env:"AEGIS_REDIS_POOL_SIZE" default:"16" help:"Connections to each Redis node."`
	// Timeout bounds each read and each write of a call. Default 20 ms.
	Timeout time.Duration `name:"redis-timeout" env:"AEGIS_REDIS_TIMEOUT" default:"20ms" help:"Bound on each read and write; a debit that takes longer counts as charged."`
	// PoolTimeout bounds the wait for a free connection. Default 10 ms.
	PoolTimeout time.Duration `name:"redis-pool-timeout" env:"AEGIS_REDIS_POOL_TIMEOUT" default:"10ms" help:"Bound on the wait for a free connection."`
	// DialTimeout bounds the opening of a connection. Default 200 ms.
	DialTimeout time.Duration `name:"redis-dial-timeout" env:"AEGIS_REDIS_DIAL_TIMEOUT" default:"200ms" help:"Bound on the opening of a connection."`
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
	case o.Password != "" && o.PasswordFile != "":
		return errors.New("redis-password, redis-password-file: set one of them, not both")
	case o.PoolSize < 0 || o.Timeout < 0 || o.PoolTimeout < 0 || o.DialTimeout < 0:
		return errors.New("redis: pool size and timeouts must not be negative")
	}
	return nil
}

// Secrets takes what must not be a flag from the environment: AEGIS_REDIS_PASSWORD and
// AEGIS_REDIS_SENTINEL_PASSWORD.
func (o *Options) Secrets(getenv func(string) string) {
	o.Password, o.SentinelPassword = getenv("AEGIS_REDIS_PASSWORD"), getenv("AEGIS_REDIS_SENTINEL_PASSWORD")
}

// withPassword is o with its password read from the file, if it names one.
func (o Options) withPassword() (Options, error) {
	if o.PasswordFile == "" {
		return o, nil
	}
	data, err := os.ReadFile(o.PasswordFile)
	if err != nil {
		return o, fmt.Errorf("redis-password-file: %w", err)
	}
	o.Password, o.PasswordFile = strings.TrimRight(string(data), "\r\n"), ""
	return o, nil
}

// withDefaults is o with its sizes and timeouts set.
func (o Options) withDefaults() Options {
	o.PoolSize = cmp.Or(o.PoolSize, 16)
	o.Timeout = cmp.Or(o.Timeout, 20*time.Millisecond)
	o.PoolTimeout = cmp.Or(o.PoolTimeout, 10*time.Millisecond)
	o.DialTimeout = cmp.Or(o.DialTimeout, 200*time.Millisecond)
	return o
}

// dial makes a client with a pool of its own, of poolSize connections to each node. It does not
// connect yet. The client repeats nothing: a debit that timed out may have run.
func (o Options) dial(poolSize int) redis.UniversalClient {
	u := &redis.UniversalOptions{
		Addrs:                 o.Addrs,
		MasterName:            o.Master,
		Username:              o.Username,
		Password:              o.Password,
		SentinelUsername:      o.SentinelUsername,
		SentinelPassword:      o.SentinelPassword,
		Protocol:              2, // RESP3 has nothing for us, and go-redis looks for its push messages at every reply
		DisableIdentity:       true,
		MaxRetries:            -1,
		DialTimeout:           o.DialTimeout,
		DialerRetries:         1,
		ReadTimeout:           o.Timeout,
		WriteTimeout:          o.Timeout,
		ContextTimeoutEnabled: true,
		PoolSize:              poolSize,
		MinIdleConns:          poolSize,
		PoolTimeout:           o.PoolTimeout,
		PipelinePoolSize:      -1, // pipelines use the same bounded pool
	}
	switch {
	case o.Cluster:
		c := u.Cluster()
		c.DisableRoutingPolicies = true // scripts go where their keys are
		// A refusal by MOVED or ASK came before anything ran. While slots move one call may meet
		// several, since nodes learn of a move one after the other: the default of 3 lost decisions.
		c.MaxRedirects = 8
		c.MinRetryBackoff = -1 // a redirection is followed at once
		return redis.NewClusterClient(c)
	case o.Master != "":
		return redis.NewFailoverClient(u.Failover())
	default:
		return redis.NewClient(u.Simple())
	}
}

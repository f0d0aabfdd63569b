package redisstore

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/ratelimiter"
)

// Store is a store.Store in Redis.
type Store struct {
	client redis.UniversalClient
	// pinger has a connection of its own, so that a ping tells of the server and not of the pool.
	pinger redis.UniversalClient

	check, giveBack, settle, begin, adjust script

	// batchers gather checks, by the node they go to; "" without a cluster.
	batchers sync.Map
	timeout  time.Duration
}

var _ store.Store = (*Store)(nil)

// quiet keeps go-redis from writing to standard error what every call returns as an error anyway.
var quiet = sync.OnceFunc(func() { redis.SetLogger(silence{}) })

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// New returns a store on the Redis that o names. It needs no answer from Redis: connections
// are opened, and scripts loaded, as calls come.
func New(o Options) (*Store, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o, err := o.withPassword()
	if err != nil {
		return nil, err
	}
	o = o.withDefaults()
	quiet()
	s := &Store{timeout: o.Timeout}
	for name, sc := range map[string]*script{
		"check": &s.check, "return": &s.giveBack, "settle": &s.settle, "begin": &s.begin, "adjust": &s.adjust,
	} {
		var err error
		if *sc, err = loadScript(name); err != nil {
			return nil, err
		}
	}
	s.client = o.dial(o.PoolSize)
	s.pinger = o.dial(1)
	return s, nil
}

// Close closes all connections. Calls under way fail.
func (s *Store) Close() error {
	return errors.Join(s.client.Close(), s.pinger.Close())
}

// Ping asks for an answer over a connection that nothing else uses. Of a cluster it fails when no
// master answers: calls to a part that is down fail by themselves.
func (s *Store) Ping(ctx context.Context) error {
	cluster, ok := s.pinger.(*redis.ClusterClient)
	if !ok {
		return s.pinger.Ping(ctx).Err()
	}
	var (
		mu       sync.Mutex
		answered bool
	)
	err := cluster.ForEachMaster(ctx, func(ctx context.Context, master *redis.Client) error {
		err := master.Ping(ctx).Err()
		mu.Lock()
		defer mu.Unlock()
		answered = answered || err == nil
		return err
	})
	if answered {
		return nil
	}
	return err
}

// Counter gives fixed windows in the same Redis, over the same connections.
func (s *Store) Counter(name string, window time.Duration) (ratelimiter.Counter, error) {
	return ratelimiter.NewRedis(name, s.client, window)
}

// Check implements store.Store.
func (s *Store) Check(ctx context.Context, c store.Check) (store.Decision, error) {
	if err := c.Validate(); err != nil {
		return store.Decision{}, err
	}
	if ctx.Err() != nil {
		return store.Decision{}, fmt.Errorf("check: %w: %w", store.ErrUnavailable, ctx.Err())
	}
	return s.batch(ctx, c)
}

// Return implements store.Store.
func (s *Store) Return(ctx context.Context, r store.Return) error {
	if err := r.Validate(); err != nil {
		return err
	}
	keys, args := returnCall(r)
	if _, err := s.run(ctx, s.giveBack, keys, args); err != nil {
		return fmt.Errorf("return: %w", err)
	}
	return nil
}

// batch decides c with others that go to the same node. While a cluster moves its slot, the
// node that has some of its keys refuses it (TRYAGAIN) before anything runs; it is tried again.
func (s *Store) batch(ctx context.Context, c store.Check) (store.Decision, error) {
	for deadline := time.Now().Add(s.timeout); ; {
		b, err := s.batcher(ctx, c)
		if err != nil {
			return store.Decision{}, fmt.Errorf("check: %w", err)
		}
		a := &ask{check: c}
		if err = b.do(ctx, a); err == nil {
			return a.decision, nil
		}
		err = fmt.Errorf("check: %w", err)
		if !redis.IsTryAgainError(err) || time.Now().After(deadline) {
			return store.Decision{}, err
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return store.Decision{}, err
		}
	}
}

// decide decides the checks in one pipeline: in one script call, but a cluster's in one for each shard, as a
// script must not touch two slots.
func (s *Store) decide(asks []*ask) {
	_, sharded := s.client.(*redis.ClusterClient)
	groups := [][]*ask{asks}
	if sharded {
		groups = byShard(asks)
	}
	calls := make([]*call, len(groups))
	for i, g := range groups {
		calls[i] = s.checkCall(g)
	}
	s.send(context.Background(), calls)
	for i, g := range groups {
		decodeDecisions(calls[i], g)
	}
}

func byShard(asks []*ask) [][]*ask {
	var groups [][]*ask
	at := map[int]int{}
	for _, a := range asks {
		shard := store.ShardOf(a.check.Client)
		i, ok := at[shard]
		if !ok {
			i, groups = len(groups), append(groups, nil)
			at[shard] = i
		}
		groups[i] = append(groups[i], a)
	}
	return groups
}

// batcher is that of the node which has c's client.
func (s *Store) batcher(ctx context.Context, c store.Check) (*batcher, error) {
	node := ""
	if cluster, ok := s.client.(*redis.ClusterClient); ok {
		shard := store.ShardOf(c.Client)
		master, err := cluster.MasterForKey(ctx, metaKey(shard))
		if err != nil {
			return nil, fmt.Errorf("%w: where shard %d is: %w", store.ErrUnavailable, shard, err)
		}
		node = master.Options().Addr
	}
	if b, ok := s.batchers.Load(node); ok {
		return b.(*batcher), nil
	}
	b, _ := s.batchers.LoadOrStore(node, &batcher{
		send:     s.decide,
		patience: s.timeout,
	})
	return b.(*batcher), nil
}

// Settle implements store.Store.
func (s *Store) Settle(ctx context.Context, st store.Settlement) (store.Settled, error) {
	if err := st.Validate(); err != nil {
		return store.Settled{}, err
	}
	keys, args := settleCall(st)
	reply, err := s.run(ctx, s.settle, keys, args)
	if err != nil {
		return store.Settled{}, fmt.Errorf("settle: %w", err)
	}
	return decodeSettled(reply, len(st.Items))
}

// Adjust implements store.Store.
func (s *Store) Adjust(ctx context.Context, a store.Adjustment) (store.ItemState, error) {
	if err := a.Validate(); err != nil {
		return store.ItemState{}, err
	}
	keys, args := adjustCall(a)
	reply, err := s.run(ctx, s.adjust, keys, args)
	if err != nil {
		return store.ItemState{}, fmt.Errorf("adjust: %w", err)
	}
	return decodeAdjusted(reply)
}

// Meta implements store.Store.
func (s *Store) Meta(ctx context.Context, shard int) (store.Meta, error) {
	if err := store.ValidateShard(shard); err != nil {
		return store.Meta{}, err
	}
	reply, err := s.client.HMGet(ctx, metaKey(shard), "epoch", "stream", "cursor").Result()
	if err != nil {
		return store.Meta{}, fmt.Errorf("meta of shard %d: %w", shard, storeError(err))
	}
	if reply[0] == nil {
		return store.Meta{}, nil
	}
	return decodeMeta(reply)
}

// Begin implements store.Store.
func (s *Store) Begin(ctx context.Context, shard int, stream string, cursor uint64) (store.Meta, error) {
	if err := store.ValidateBegin(shard, stream, cursor); err != nil {
		return store.Meta{}, err
	}
	return s.place(ctx, shard, stream, cursor, "")
}

// Rebase implements store.Store.
func (s *Store) Rebase(ctx context.Context, shard int, stream string, from, cursor uint64) (store.Meta, error) {
	if err := store.ValidateBegin(shard, stream, max(from, cursor)); err != nil {
		return store.Meta{}, err
	}
	return s.place(ctx, shard, stream, cursor, strconv.FormatUint(from, 10))
}

func (s *Store) place(ctx context.Context, shard int, stream string, cursor uint64, from string) (store.Meta, error) {
	reply, err := s.run(ctx, s.begin, []string{metaKey(shard)}, []any{stream, cursor, formatVersion, from})
	if err != nil {
		return store.Meta{}, fmt.Errorf("begin shard %d: %w", shard, err)
	}
	return decodeMeta(reply)
}

package redisstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// Store is a store.Store in Redis.
type Store struct {
	client redis.UniversalClient
	// pinger has a connection of its own, so that a ping tells of the server and not of the pool.
	pinger redis.UniversalClient

	check, settle, begin script
}

var _ store.Store = (*Store)(nil)

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
	s := &Store{}
	for name, sc := range map[string]*script{"check": &s.check, "settle": &s.settle, "begin": &s.begin} {
		var err error
		if *sc, err = loadScript(name); err != nil {
			return nil, err
		}
	}
	s.client = o.dial(cmp.Or(o.PoolSize, 16))
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

// Check implements store.Store.
func (s *Store) Check(ctx context.Context, c store.Check) (store.Decision, error) {
	if err := c.Validate(); err != nil {
		return store.Decision{}, err
	}
	keys, args := checkCall(c)
	reply, err := s.run(ctx, s.check, keys, args)
	if err != nil {
		return store.Decision{}, fmt.Errorf("check: %w", err)
	}
	return decodeDecision(reply, len(c.Limits))
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
	reply, err := s.run(ctx, s.begin, []string{metaKey(shard)}, []any{stream, cursor, formatVersion})
	if err != nil {
		return store.Meta{}, fmt.Errorf("begin shard %d: %w", shard, err)
	}
	return decodeMeta(reply)
}

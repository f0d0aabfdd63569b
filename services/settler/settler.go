package settler

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// Deps is what a settler works with. The caller owns all of it.
type Deps struct {
	Bus      *bus.Bus
	Store    store.Store
	Log      zerolog.Logger
	Registry prometheus.Registerer
}

// Service is one settler.
type Service struct {
	cfg     Config
	bus     *bus.Bus
	store   store.Store
	log     zerolog.Logger
	metrics *metrics

	shards [store.Shards]shard
	// wake tells the catch-up reader that a shard was parked.
	wake chan struct{}

	// turn is held by the main reader while it applies one message, by the upkeep
	// of its idle shards, and by whoever moves a shard from or to a reader. It may
	// be held for as long as a store or NATS is waited for; what only looks on
	// (readiness, metrics) reads the atomics instead.
	turn sync.Mutex
	// incarnation is the StreamState.ID that is read, "" before it is known.
	incarnation atomic.Value
	// position is the last sequence that the main reader is done with.
	position atomic.Uint64
	// seen is the highest sequence counted in the metrics, so that what is read again is not counted again.
	seen    atomic.Uint64
	history history
	session time.Duration // see the constant; shorter in tests
}

// owner says which reader may settle into a shard.
type owner = uint32

const (
	parked     owner = iota // nobody, until shard.retry
	catchingUp              // the catch-up reader
	upToDate                // the main reader: settled up to position
)

// shard is what a settler knows of one shard of the store.
type shard struct {
	// owner changes only under Service.turn.
	owner atomic.Uint32
	// retry is when a parked shard is looked at again, after failures in a row; under Service.turn.
	retry    time.Time
	failures int

	// known says that cursor was read from the store. cursor is never above what
	// the store last answered; only the shard's owner moves it.
	known  atomic.Bool
	cursor atomic.Uint64
	// restored says that the stream was, from a backup, and the shard's cursor has to be placed in it anew.
	restored atomic.Bool
}

// New checks the configuration and registers the metrics.
func New(cfg Config, deps Deps) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("settler: %w", err)
	}
	m, err := newMetrics(deps.Registry)
	if err != nil {
		return nil, fmt.Errorf("settler: metrics: %w", err)
	}
	s := &Service{
		cfg:     cfg,
		bus:     deps.Bus,
		store:   deps.Store,
		log:     deps.Log,
		metrics: m,
		wake:    make(chan struct{}, 1),
		history: history{retention: max(cfg.PurgeAge, cfg.CounterRetention)},
		session: session,
	}
	s.incarnation.Store("")
	return s, nil
}

// Run settles until ctx ends, and then returns nil.
func (s *Service) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, work := range []func(context.Context){s.consume, s.catchUp, s.upkeep} {
		wg.Go(func() { work(ctx) })
	}
	wg.Wait()
	return nil
}

// Flush waits until what the stream holds now is settled in every shard. It is
// for an orderly stop: edges first, then Flush, then the settler.
func (s *Service) Flush(ctx context.Context) error {
	state, err := s.bus.Stream(ctx, events.StreamResponses)
	if err != nil {
		return fmt.Errorf("settler: flush: %w", err)
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if s.settledTo(state.ID, state.Last) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("settler: flush: not settled up to %d: %w", state.Last, ctx.Err())
		case <-tick.C:
		}
	}
}

// settledTo says whether every shard has been settled up to seq of the stream.
// A shard is parked before position passes what it missed: so position is read first.
func (s *Service) settledTo(stream string, seq uint64) bool {
	if s.incarnation.Load() != stream || s.position.Load() < seq {
		return false
	}
	return s.count(upToDate) == store.Shards
}

// count is how many shards have this owner.
func (s *Service) count(o owner) int {
	n := 0
	for i := range s.shards {
		if s.shards[i].owner.Load() == o {
			n++
		}
	}
	return n
}

// Detail is what readiness tells about a settler.
type Detail struct {
	// Stream is the incarnation read, Position the last message done.
	Stream   string `json:"stream"`
	Position uint64 `json:"position"`
	// Lowest is the lowest cursor of all shards; Lag how many messages it is behind Position.
	Lowest uint64 `json:"lowest_cursor"`
	Lag    uint64 `json:"lag"`
	// Parked counts the shards that wait for their store or catch up.
	Parked int `json:"parked_shards"`
}

var (
	errDisconnected = errors.New("not connected to NATS")
	errNoStream     = errors.New("the stream of responses has not been read yet")
	errAllParked    = errors.New("no shard of the store is up to date")
)

// Ready reports whether the settler settles anything, as a readiness probe.
func (s *Service) Ready(context.Context) (any, error) {
	d := Detail{
		Stream:   s.incarnation.Load().(string),
		Position: s.position.Load(),
		Parked:   store.Shards - s.count(upToDate),
	}
	d.Lowest, _ = s.lowest()
	if d.Position > d.Lowest {
		d.Lag = d.Position - d.Lowest
	}
	switch {
	case !s.bus.Connected():
		return d, errDisconnected
	case d.Stream == "":
		return d, errNoStream
	case d.Parked == store.Shards:
		return d, errAllParked
	}
	return d, nil
}

// lowest is the lowest cursor of all shards; false while one of them is unknown.
func (s *Service) lowest() (uint64, bool) {
	low, known := uint64(0), true
	for i := range s.shards {
		known = known && s.shards[i].known.Load()
		if c := s.shards[i].cursor.Load(); i == 0 || c < low {
			low = c
		}
	}
	return low, known
}

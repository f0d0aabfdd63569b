package healthwatch

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// Deps is what a replica works with. The caller owns all of it.
type Deps struct {
	Bus      *bus.Bus
	Log      zerolog.Logger
	Registry prometheus.Registerer
}

// Service is one replica.
type Service struct {
	cfg     Config
	bus     *bus.Bus
	log     zerolog.Logger
	metrics *metrics
	fold    *fold

	// config is the version in force, 0 before one came.
	config atomic.Uint64
	// configured is closed by the first policy, warm when the window has been read again.
	configured, warm chan struct{}
}

// New checks the configuration and registers the metrics.
func New(cfg Config, deps Deps) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("healthwatch: %w", err)
	}
	if cfg.Name == "" { // not in Validate, which kong calls before a main can set it
		return nil, errors.New("healthwatch: name: must be set")
	}
	start := time.Now()
	s := &Service{
		cfg:        cfg,
		bus:        deps.Bus,
		log:        deps.Log.With().Str("replica", cfg.Name).Logger(),
		fold:       newFold(cfg.Name, cfg.Interval, func() time.Duration { return time.Since(start) }),
		configured: make(chan struct{}),
		warm:       make(chan struct{}),
	}
	m, err := newMetrics(deps.Registry, s.fold.last)
	if err != nil {
		return nil, fmt.Errorf("healthwatch: metrics: %w", err)
	}
	s.metrics = m
	return s, nil
}

// Run watches until ctx ends, and then returns nil.
func (s *Service) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, work := range []func(context.Context){s.followConfig, s.followTicks, s.followResponses, s.step} {
		wg.Go(func() { work(ctx) })
	}
	wg.Wait()
	return nil
}

// Detail is what readiness tells about a replica.
type Detail struct {
	// Config is the config version in force, 0 before one came.
	Config uint64 `json:"config"`
	// Upstreams has the last tick of each upstream.
	Upstreams map[string]events.Health `json:"upstreams"`
}

var (
	errDisconnected = errors.New("not connected to NATS")
	errNoPolicy     = errors.New("no config version has come yet")
)

// Ready reports whether the replica watches anything, as a readiness probe.
func (s *Service) Ready(context.Context) (any, error) {
	d := Detail{Config: s.config.Load(), Upstreams: s.fold.last()}
	switch {
	case !s.bus.Connected():
		return d, errDisconnected
	case d.Config == 0:
		return d, errNoPolicy
	}
	return d, nil
}

// follow reads a stream until ctx ends; when the stream was made anew it calls
// reset and begins again. fn's live says that the message came as it was stored,
// and not from before.
func (s *Service) follow(ctx context.Context, stream string, from func() bus.Start, reset func(), fn func(m bus.Message)) {
	for ctx.Err() == nil {
		live := false
		err := s.bus.Follow(ctx, stream, from(), func(m bus.Message) error {
			if live {
				s.fold.observe(m.Time)
			}
			live = live || m.Pending == 0
			fn(m)
			return nil
		})
		if ctx.Err() == nil {
			s.log.Warn().Err(err).Str("stream", stream).Msg("the stream is another one; reading it from its beginning")
			reset()
		}
	}
}

// followConfig keeps the upstreams and their rules up to date. A version that can't be
// used is counted and changes nothing.
func (s *Service) followConfig(ctx context.Context) {
	s.follow(ctx, events.StreamConfig, bus.LastPerSubject, func() {}, func(m bus.Message) {
		v, err := events.DecodeConfig(m.Data, m.Seq)
		var table *policy.Table
		if err == nil {
			table, err = compile(v)
		}
		if err != nil {
			s.metrics.malformed.WithLabelValues(events.StreamConfig).Inc()
			s.log.Error().Err(err).Uint64("seq", m.Seq).Msg("cannot use this config version; the last one stays in force")
			return
		}
		s.fold.configure(table.Upstreams())
		if s.config.Swap(v.Version) == 0 {
			close(s.configured)
		}
		s.log.Info().Uint64("config", v.Version).Int("upstreams", len(table.Upstreams())).Msg("watching by this config version")
	})
}

func compile(v events.ConfigVersion) (*policy.Table, error) {
	p, _, err := policy.Receive(v.Document)
	if err != nil {
		return nil, err
	}
	return policy.Compile(p, v.Version)
}

// followTicks learns of the ticks that any replica published.
func (s *Service) followTicks(ctx context.Context) {
	s.follow(ctx, events.StreamHealth, bus.LastPerSubject, s.fold.reset, func(m bus.Message) {
		s.fold.see(events.UpstreamOf(m.Subject), s.tickOf(m))
	})
}

// tickOf reads a tick. One that can't be read still has its place in the
// stream: the next one is published after it, from what was known before.
func (s *Service) tickOf(m bus.Message) tick {
	h, err := events.Decode[events.Health](m.Data)
	if err != nil {
		s.metrics.malformed.WithLabelValues(events.StreamHealth).Inc()
		s.log.Error().Err(err).Uint64("seq", m.Seq).Str("subject", m.Subject).Msg("cannot read this tick")
		return tick{seq: m.Seq}
	}
	return tick{m.Seq, h}
}

// warmUp is how long a stream that gives no message is waited for before it counts as silent.
const warmUp = 2 * time.Second

// followResponses fills the windows, from what may still be in one. Messages that can't be
// read are counted; the settler is the one who sets them aside.
func (s *Service) followResponses(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-s.configured:
	}
	var once sync.Once
	ready := func() { once.Do(func() { close(s.warm) }) }
	defer time.AfterFunc(warmUp, ready).Stop()
	from := func() bus.Start { return bus.FromTime(time.Now().Add(-s.fold.maxAge())) }
	s.follow(ctx, events.StreamResponses, from, func() {}, func(m bus.Message) {
		if m.Pending == 0 {
			defer ready()
		}
		batch, err := events.Decode[events.ResponseBatch](m.Data)
		if err != nil {
			s.metrics.malformed.WithLabelValues(events.StreamResponses).Inc()
			s.log.Warn().Err(err).Uint64("seq", m.Seq).Msg("skipping a message that can't be read")
			return
		}
		s.metrics.events.Add(float64(len(batch.Events)))
		s.fold.add(batch, m.Time)
	})
}

// step publishes the next tick of every upstream that is due, until ctx ends.
func (s *Service) step(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-s.warm:
	}
	for ctx.Err() == nil {
		steps, wait := s.fold.due()
		const atOnce = 16
		slots := make(chan struct{}, atOnce)
		var wg sync.WaitGroup
		for _, next := range steps {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				s.publish(ctx, next)
			})
		}
		wg.Wait()
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		t.Stop()
	}
}

// publish publishes a step, or finds out which one was published instead.
func (s *Service) publish(ctx context.Context, next intent) {
	subject := events.SubjectHealth(next.name)
	data, err := events.Encode(next.health)
	if err != nil {
		s.log.Error().Err(err).Str("upstream", next.name).Msg("cannot encode a tick")
		return
	}
	ctx, cancel := context.WithTimeout(ctx, max(s.cfg.Interval, time.Second))
	defer cancel()
	seq, err := s.bus.Publish(ctx, subject, data, bus.WithLastSubjectSeq(next.after))
	switch {
	case err == nil:
		s.metrics.ticks.Inc()
		s.fold.conclude(next.name, next.after, tick{seq, next.health})
	case errors.Is(err, bus.ErrConflict):
		s.metrics.conflicts.Inc()
		s.adopt(ctx, subject, next)
	default:
		s.metrics.failures.Inc()
		s.log.Debug().Err(err).Str("upstream", next.name).Msg("cannot publish a tick; trying again in an interval")
	}
}

// adopt goes on from the tick that is last in the stream.
func (s *Service) adopt(ctx context.Context, subject string, next intent) {
	m, err := s.bus.Last(ctx, events.StreamHealth, subject)
	switch {
	case err == nil:
		s.fold.conclude(next.name, next.after, s.tickOf(m))
	case errors.Is(err, bus.ErrNotFound):
		s.fold.conclude(next.name, next.after, tick{}) // the stream was made anew
	default:
		s.log.Debug().Err(err).Str("upstream", next.name).Msg("cannot read the last tick; trying again in an interval")
	}
}

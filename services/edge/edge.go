package edge

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/lifecycle"
	"github.com/aegisrate/aegisrate/pkg/ratelimiter"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
	"github.com/aegisrate/aegisrate/services/edge/admission"
	"github.com/aegisrate/aegisrate/services/edge/deferral"
	"github.com/aegisrate/aegisrate/services/edge/llm"
	"github.com/aegisrate/aegisrate/services/edge/proxy"
)

// Deps is what an edge works with. The caller owns all of it, and closes it after Run.
type Deps struct {
	Bus   *bus.Bus
	Store store.Store
	// Ping asks the store for a sign of life, on a connection of its own; nil: the store can't be away.
	Ping func(context.Context) error
	// Counter makes the shared counters of LLM quotas; nil: such quotas are not enforced.
	Counter  func(name string, window time.Duration) (ratelimiter.Counter, error)
	Log      zerolog.Logger
	Registry prometheus.Registerer
}

// Service is one edge.
type Service struct {
	cfg      Config
	bus      *bus.Bus
	ping     func(context.Context) error
	log      zerolog.Logger
	boot     string
	engine   *admission.Engine
	outbox   *bus.Outbox[admission.Record]
	handler  *proxy.Handler
	deferred *deferral.Queue
	policies *policyFeed
	health   healthFeed
	clients  *directory
	listener net.Listener
	cert     *certificate // nil without TLS
	draining atomic.Bool
}

// New makes an edge that listens already, with the policy found on disk, if any. Run serves and closes it.
func New(cfg Config, deps Deps) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("edge: %w", err)
	}
	cfg, err := cfg.withID()
	if err != nil {
		return nil, fmt.Errorf("edge: %w", err)
	}
	if deps.Counter == nil {
		deps.Counter = func(string, time.Duration) (ratelimiter.Counter, error) { return ratelimiter.NewNoop(), nil }
	}
	s := &Service{
		cfg:  cfg,
		bus:  deps.Bus,
		ping: deps.Ping,
		boot: strings.ToLower(rand.Text()),
	}
	s.log = deps.Log.With().Str("edge", cfg.ID).Str("boot", s.boot).Logger()
	spool := ""
	if cfg.SpoolBytes > 0 {
		spool = filepath.Join(cfg.DataDir, "spool")
	}
	s.outbox, err = bus.NewOutbox(deps.Bus, bus.OutboxConfig[admission.Record]{
		Subject:    events.SubjectResponse(s.boot),
		ID:         s.boot,
		MaxQueued:  cfg.MaxQueued,
		Spool:      spool,
		SpoolBytes: cfg.SpoolBytes,
		Log:        s.log,
		Encode: func(n uint64, batch []admission.Record) ([]byte, error) {
			return admission.EncodeBatch(cfg.ID, s.boot, n, batch)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("edge: data-dir: %w", err)
	}
	clock := admission.NewStoreClock(time.Now)
	s.engine = &admission.Engine{
		Identifier:  admission.Identifier{Trusted: cfg.TrustedProxies, IPv6Bits: cfg.IPv6Prefix},
		Store:       deps.Store,
		Local:       memstore.New(clock.Micros, memstore.AtMost(localBuckets)),
		Clock:       clock,
		Breaker:     admission.NewBreaker(time.Now, s.breakerChanged),
		Fleet:       admission.NewFleet(s.boot),
		Multipliers: admission.NewMultipliers(time.Now),
		Sink:        s.outbox,
		Memory:      admission.NewMemory(admission.DefaultMemory),
		Carried:     admission.NewCarried(admission.DefaultCarried),
		Returned:    s.returned,
	}
	metrics := newMetrics(deps.Registry, s)
	s.policies = &policyFeed{engine: s.engine, dir: cfg.DataDir, file: cfg.PolicyFile, metrics: metrics, log: s.log}
	if s.policies.key, err = events.ParsePublicKey(cfg.ConfigPublicKey); err != nil {
		return nil, fmt.Errorf("edge: config-public-key: %w", err)
	}
	s.health = healthFeed{multipliers: s.engine.Multipliers, metrics: metrics, log: s.log}
	if s.clients, err = newDirectory(cfg, deps.Bus, metrics, s.log); err != nil {
		return nil, fmt.Errorf("edge: %w", err)
	}
	s.clients.load()
	s.policies.plans, s.clients.plansChanged = s.clients.plans, s.policies.usePlans
	s.clients.changed = func(client string) { s.engine.Changed(events.ChangedBucket{Client: client}) }
	s.engine.Directory = s.clients
	if err := s.policies.load(); err != nil {
		return nil, fmt.Errorf("edge: %w", err)
	}
	counters, err := llm.NewCounters(deps.Counter)
	if err != nil {
		return nil, fmt.Errorf("edge: %w", err)
	}
	quotas := &llm.Limiter{
		Shared: counters, Local: llm.NewLocal(time.Now),
		Breaker: s.engine.Breaker, Fleet: s.engine.Fleet, Now: time.Now,
	}
	secret, err := cfg.secret()
	if err == nil {
		s.deferred, err = deferral.New(deferral.Config{Bus: deps.Bus, Secret: secret, Log: s.log})
	}
	if err != nil {
		return nil, fmt.Errorf("edge: %w", err)
	}
	s.handler = proxy.New(proxy.Options{
		Engine: s.engine, LLM: quotas, AccessLog: cfg.AccessLog, BodyTimeout: cfg.BodyTimeout, CacheBytes: cfg.CacheBytes, Deferrals: s.deferred,
		Log: s.log, Registry: deps.Registry,
	})
	if cfg.TLSCertFile != "" {
		if s.cert, err = newCertificate(cfg.TLSCertFile, cfg.TLSKeyFile, s.log); err != nil {
			return nil, fmt.Errorf("edge: %w", err)
		}
	}
	if s.listener, err = listen(cfg, s.engine.Identifier); err != nil {
		return nil, fmt.Errorf("edge: %w", err)
	}
	return s, nil
}

// Addr is where clients are served.
func (s *Service) Addr() string { return s.listener.Addr().String() }

// Boot names this incarnation of the edge.
func (s *Service) Boot() string { return s.boot }

// Run serves until ctx ends and every request under way is over and reported, each within its bound.
func (s *Service) Run(ctx context.Context) error {
	run := func(work func(context.Context)) func(context.Context) error {
		return func(ctx context.Context) error { work(ctx); return nil }
	}
	// Senders come after what they send into, so that they stop before it.
	return lifecycle.Run(ctx,
		lifecycle.Component{Name: "heartbeat", Run: s.beat},
		lifecycle.Component{Name: "outbox", Run: s.publish, Stop: s.cfg.FlushTimeout + time.Second},
		lifecycle.Component{Name: "breaker", Run: s.watchStore},
		lifecycle.Component{Name: "health", Run: run(func(ctx context.Context) { s.health.follow(ctx, s.bus) })},
		lifecycle.Component{Name: "policy", Run: run(func(ctx context.Context) { s.policies.follow(ctx, s.bus) })},
		lifecycle.Component{Name: "rules", Run: run(s.clients.follow)},
		lifecycle.Component{Name: "rules on disk", Run: run(s.clients.keep)},
		lifecycle.Component{Name: "changes", Run: s.hearChanges},
		lifecycle.Component{Name: "leases", Run: s.leases, Stop: closeTimeout + time.Second},
		lifecycle.Component{Name: "http", Run: s.serve, Stop: s.cfg.DrainWait + s.cfg.DrainTimeout + closeTimeout + time.Second},
		lifecycle.Component{Name: "deferred", Run: run(s.runDeferred), Stop: 2 * closeTimeout},
	)
}

// runDeferred runs what clients were promised, on this edge or another.
func (s *Service) runDeferred(ctx context.Context) { s.deferred.Run(ctx, s.handler, closeTimeout) }

// localBuckets bounds the buckets kept for when the store is away: a client has one or more.
const localBuckets = 100_000

// closeTimeout bounds the end of exchanges that have been cut off.
const closeTimeout = 2 * time.Second

func (s *Service) serve(ctx context.Context) error {
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	defer context.AfterFunc(ctx, func() {
		s.draining.Store(true)
		time.Sleep(s.cfg.DrainWait) // balancers must see it first
		stop()
	})()
	var opts []telemetry.ServerOption
	if s.cfg.H2C {
		opts = append(opts, telemetry.H2C())
	}
	if s.cert != nil {
		opts = append(opts, telemetry.TLS(&tls.Config{GetCertificate: s.cert.get}))
	}
	s.log.Info().Str("addr", s.Addr()).Msg("serving")
	err := telemetry.Serve(serving, telemetry.NewHTTPServer(s.handler, s.log, opts...), s.listener, s.cfg.DrainTimeout)
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	return errors.Join(err, s.handler.Close(bound))
}

// publish runs the outbox, and empties it at the end.
func (s *Service) publish(ctx context.Context) error {
	if err := s.outbox.Run(ctx); err != nil {
		return err
	}
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.FlushTimeout)
	defer cancel()
	return s.outbox.Close(bound)
}

func (s *Service) watchStore(ctx context.Context) error {
	if s.ping == nil {
		return nil
	}
	s.engine.Breaker.Run(ctx, s.ping)
	return nil
}

func (s *Service) breakerChanged(state admission.BreakerState) {
	switch state {
	case admission.Open:
		s.log.Error().Int64("live_edges", s.engine.Fleet.Live()).Msg("the store does not answer: deciding from this edge's share of each limit")
	case admission.Closed:
		s.log.Info().Msg("the store answers again: deciding with it")
	}
}

// beat says every second that this edge is alive, and hears the others.
func (s *Service) beat(ctx context.Context) error {
	sub, err := s.bus.Subscribe(events.AllHeartbeats, func(m bus.Message) {
		h, err := events.Decode[events.Heartbeat](m.Data)
		if err == nil && m.Subject != events.SubjectHeartbeat(h.Edge) {
			err = fmt.Errorf("it tells of edge %q", h.Edge)
		}
		if err != nil {
			s.log.Warn().Err(err).Str("subject", m.Subject).Msg("heartbeat refused")
			return
		}
		s.engine.Fleet.Heard(h.Boot, h.Leaving, time.Now())
	})
	if err != nil {
		return err
	}
	defer sub.Stop()
	tick := time.NewTicker(admission.BeatInterval)
	defer tick.Stop()
	for {
		s.sendBeat(false)
		select {
		case <-ctx.Done():
			s.sendBeat(true)
			return nil
		case <-tick.C:
		}
	}
}

func (s *Service) sendBeat(leaving bool) {
	h := events.Heartbeat{Edge: s.cfg.ID, Boot: s.boot, Degraded: s.engine.Degraded(), Leaving: leaving}
	if t := s.engine.Table(); t != nil {
		h.Config = t.Version()
	}
	h.Green, h.Yellow, h.Red = s.engine.TakeTiers()
	stats := s.outbox.Stats()
	h.Queued, h.Lost = stats.Queued, stats.Lost
	data, err := events.Encode(h)
	if err == nil {
		err = s.bus.Send(events.SubjectHeartbeat(s.cfg.ID), data)
	}
	if err != nil { // NATS is away; the next beat may come through
		s.log.Debug().Err(err).Msg("heartbeat not sent")
	}
}

var (
	errDraining = errors.New("the edge is shutting down")
	errNoPolicy = errors.New("no policy yet: NATS has none to give, and neither a snapshot nor a policy file is there")
)

// Detail is what an edge says of itself when asked whether it is ready.
type Detail struct {
	PolicyVersion uint64 `json:"policy_version"`
	// Store is the breaker's state; "open": deciding without the shared store.
	Store     string `json:"store"`
	Degraded  bool   `json:"degraded"`
	NATS      bool   `json:"nats_connected"`
	LiveEdges int64  `json:"live_edges"`
	Queued    int    `json:"events_queued"`
	// SpoolBytes is how much of them is on disk; SpoolFull, that more find no room there.
	SpoolBytes int64  `json:"spool_bytes"`
	SpoolFull  bool   `json:"spool_full"`
	Lost       uint64 `json:"events_lost"`
	// Multipliers are those of upstreams that are unwell, in millionths.
	Multipliers map[string]int64 `json:"multipliers,omitempty"`
}

// Ready reports whether the edge can decide requests, as a readiness probe. An edge
// without NATS or Redis is degraded and ready.
func (s *Service) Ready(context.Context) (any, error) {
	stats := s.outbox.Stats()
	d := Detail{
		Store:      s.engine.Breaker.State().String(),
		Degraded:   s.engine.Degraded(),
		NATS:       s.bus.Connected(),
		LiveEdges:  s.engine.Fleet.Live(),
		Queued:     stats.Queued,
		SpoolBytes: stats.Spooled,
		SpoolFull:  stats.Full,
		Lost:       stats.Lost,
	}
	table := s.engine.Table()
	if table != nil {
		d.PolicyVersion = table.Version()
		for upstream := range table.Upstreams() {
			if m := s.engine.Multipliers.Get(upstream); m < bucket.One {
				if d.Multipliers == nil {
					d.Multipliers = make(map[string]int64)
				}
				d.Multipliers[upstream] = m
			}
		}
	}
	switch {
	case s.draining.Load():
		return d, errDraining
	case table == nil:
		return d, errNoPolicy
	}
	return d, nil
}

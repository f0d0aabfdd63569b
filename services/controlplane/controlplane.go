package controlplane

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/lifecycle"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore/jetstream"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore/postgres"
)

const (
	// auditFlush bounds how long audit events are waited for at the end.
	auditFlush = 3 * time.Second
	// maxAudits is how many audit events may wait for NATS.
	maxAudits = 10_000
	// maxAuditDetail bounds one audit event, in bytes.
	maxAuditDetail = 1000
)

// Deps is what a controlplane works with. The caller owns all of it.
type Deps struct {
	Bus *bus.Bus
	// Store has the clients' buckets; nil: there are no operations on them.
	Store    store.Store
	Log      zerolog.Logger
	Registry prometheus.Registerer
}

// Service is one controlplane.
type Service struct {
	cfg      Config
	bus      *bus.Bus
	log      zerolog.Logger
	metrics  *metrics
	gate     *gate
	versions *versions
	status   *status
	rules    rulestore.Store
	store    store.Store
	audits   *bus.Outbox[events.Audit]
	// writing is held by the one change that is being made.
	writing chan struct{}
	addr    atomic.Pointer[string] // where the API is served, once it is
}

// New makes a controlplane; its policy file and token are read here.
func New(cfg Config, deps Deps) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	digest, err := cfg.tokenDigest()
	if err != nil {
		return nil, err
	}
	initial, err := cfg.policy()
	if err != nil {
		return nil, err
	}
	s := &Service{
		cfg:     cfg,
		bus:     deps.Bus,
		store:   deps.Store,
		log:     deps.Log,
		gate:    &gate{digest: digest, tokenlessNATS: cfg.AllowTokenlessNATS, attempts: newAttempts()},
		status:  newStatus(deps.Bus, deps.Log),
		writing: make(chan struct{}, 1),
	}
	s.audits, err = bus.NewOutbox(deps.Bus, bus.OutboxConfig[events.Audit]{
		Subject: events.SubjectAudit, ID: "audit-" + rand.Text(), MaxBatch: 1, MaxQueued: maxAudits, Log: deps.Log,
		Encode: func(_ uint64, batch []events.Audit) ([]byte, error) { return events.Encode(batch[0]) },
	})
	if err != nil {
		return nil, err
	}
	if s.rules, err = openRules(cfg, deps); err != nil {
		return nil, err
	}
	s.metrics, err = newMetrics(deps.Registry, func() float64 { return float64(s.audits.Stats().Lost) })
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	s.versions = &versions{bus: deps.Bus, log: deps.Log, metrics: s.metrics, initial: initial, amiss: make(chan struct{}, 1)}
	if cfg.ConfigKey != "" {
		s.versions.key = events.ConfigKey(cfg.ConfigKey)
	}
	return s, nil
}

// openRules gives the store of the rules: PostgreSQL, or without a DSN JetStream.
func openRules(cfg Config, deps Deps) (rulestore.Store, error) {
	if cfg.RulesDSN == "" {
		return jetstream.New(deps.Bus, deps.Log), nil
	}
	password, err := cfg.rulesPassword()
	if err != nil {
		return nil, err
	}
	return postgres.New(postgres.Config{DSN: cfg.RulesDSN, ReadDSN: cfg.RulesReadDSN, Password: password}, deps.Bus, deps.Log)
}

// runRules keeps the store of the rules going until ctx ends.
func (s *Service) runRules(ctx context.Context) error {
	if c, ok := s.rules.(interface{ Close() }); ok {
		defer c.Close()
	}
	return s.rules.Run(ctx)
}

// Run serves until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	ln, err := net.Listen("tcp", s.cfg.Addr)
	if err != nil {
		return fmt.Errorf("addr: %w", err)
	}
	s.addr.Store(new(ln.Addr().String()))
	if tcp, ok := ln.Addr().(*net.TCPAddr); ok && s.gate.digest == nil && !tcp.IP.IsLoopback() {
		s.log.Warn().Stringer("addr", ln.Addr()).Msg("no admin token is configured: the API listens to the network but serves this machine only")
	}
	s.log.Info().Stringer("addr", ln.Addr()).Bool("token", s.gate.digest != nil).Str("rules", s.rules.About()).Msg("serving the admin API")
	// What takes changes stops first, what records them last.
	return lifecycle.Run(ctx,
		lifecycle.Component{Name: "audit", Run: s.publishAudits, Stop: auditFlush + time.Second},
		lifecycle.Component{Name: "config upkeep", Run: s.versions.upkeep},
		lifecycle.Component{Name: "config", Run: s.versions.follow},
		lifecycle.Component{Name: "health", Run: s.status.followHealth},
		lifecycle.Component{Name: "edges", Run: s.status.followEdges},
		lifecycle.Component{Name: "rules", Run: s.runRules},
		lifecycle.Component{Name: "commands", Run: s.serveNATS},
		lifecycle.Component{Name: "api", Stop: s.cfg.DrainTimeout + time.Second, Run: func(ctx context.Context) error {
			return telemetry.Serve(ctx, telemetry.NewHTTPServer(s.routes(), s.log), ln, s.cfg.DrainTimeout)
		}},
	)
}

// Addr is where the API is served, or is to be served.
func (s *Service) Addr() string {
	if a := s.addr.Load(); a != nil {
		return *a
	}
	return s.cfg.Addr
}

// Ready says whether changes can be taken: a readiness probe.
func (s *Service) Ready(context.Context) (any, error) {
	cur := s.versions.current()
	detail := map[string]any{"nats": s.bus.Connected()}
	if cur != nil {
		detail["version"] = cur.Version
	}
	switch {
	case s.addr.Load() == nil:
		return detail, errors.New("not serving yet")
	case cur == nil:
		return detail, errors.New("no config is known: NATS has none, or can't be reached; give the controlplane a policy file to begin with")
	case !s.bus.Connected():
		return detail, errors.New("NATS can't be reached; the last known config is served, changes are refused")
	}
	return detail, nil
}

// audit records an admin operation or a failed attempt at one; it never waits for NATS.
func (s *Service) audit(a events.Audit) {
	a.Time = time.Now().UTC()
	if len(a.Detail) > maxAuditDetail {
		a.Detail = a.Detail[:maxAuditDetail] + "…"
	}
	s.log.Info().Str("action", a.Action).Str("by", a.By).Str("via", a.Via).Str("result", a.Result).Str("detail", a.Detail).Msg("audit")
	s.audits.Add(a)
}

func (s *Service) publishAudits(ctx context.Context) error {
	if err := s.audits.Run(ctx); err != nil {
		return err
	}
	flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), auditFlush)
	defer cancel()
	return s.audits.Close(flush)
}

// oneLine makes text fit for a NATS header.
func oneLine(s string) string {
	const longest = 512
	b := []byte(s)
	for i, c := range b {
		if c < ' ' {
			b[i] = ' '
		}
	}
	return string(b[:min(len(b), longest)])
}

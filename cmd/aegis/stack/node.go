package stack

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/redisstore"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/lifecycle"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
)

// Node is one running service.
type Node struct {
	// addr gives where it serves; nil for services that serve nothing but their health.
	addr  func() string
	admin *telemetry.Admin
	// flush is the settler's.
	flush func(context.Context) error

	cancel context.CancelFunc
	halted atomic.Bool
	done   chan struct{} // closed when it has ended; err is set by then
	err    error
}

// Addr is where the service serves, AdminAddr where its health and metrics are.
func (n *Node) Addr() string {
	if n.addr == nil {
		return ""
	}
	return n.addr()
}

// AdminAddr is where the service's health and metrics are.
func (n *Node) AdminAddr() string { return n.admin.Addr() }

// Stop stops this service alone, in order, and waits for it.
func (n *Node) Stop() error {
	n.halted.Store(true)
	n.cancel()
	<-n.done
	return n.err
}

// stopping says that its end was asked for.
func (n *Node) stopping() bool { return n.halted.Load() }

func (n *Node) stopped() bool {
	select {
	case <-n.done:
		return true
	default:
		return false
	}
}

// service is what the four services have in common.
type service interface {
	Run(ctx context.Context) error
	Ready(ctx context.Context) (any, error)
}

// deps is what a service is made with.
type deps struct {
	bus      *bus.Bus
	store    *redisstore.Store
	log      zerolog.Logger
	registry *telemetry.Registry
}

// start runs a service and returns when it is ready. It has connections, metrics and
// health of its own, as it would in a process of its own.
func (s *Stack) start(ctx context.Context, name, adminAddr string, build func(*Node, deps) (service, error)) (_ *Node, err error) {
	log := s.cfg.Log.With().Str("service", name).Logger()
	b, err := s.connect(ctx, name)
	if err != nil {
		return nil, err
	}
	store, err := redisstore.New(s.redisOptions)
	if err != nil {
		b.Close()
		return nil, err
	}
	closeAll := func() {
		b.Close()
		if err := store.Close(); err != nil {
			log.Warn().Err(err).Msg("closing the connections to Redis")
		}
	}
	registry := telemetry.NewRegistry(name)
	n := &Node{admin: telemetry.NewAdmin(adminAddr, registry, log), done: make(chan struct{})}
	svc, err := build(n, deps{bus: b, store: store, log: log, registry: registry})
	if err != nil {
		closeAll()
		return nil, err
	}
	n.admin.AddReadiness(name, svc.Ready)

	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	n.cancel = cancel
	ready := make(chan struct{})
	go func() {
		defer close(n.done)
		defer cancel()
		defer closeAll()
		n.err = lifecycle.Run(running,
			lifecycle.Component{Name: "admin", Run: n.admin.Run, Ready: n.admin.Ready},
			lifecycle.Component{Name: name, Run: svc.Run, Stop: serviceTimeout, Ready: func(ctx context.Context) error {
				if err := awaitReady(ctx, svc); err != nil {
					return err
				}
				close(ready)
				return nil
			}},
		)
	}()
	select {
	case <-ready:
		return n, nil
	case <-n.done:
		return nil, n.err
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), n.Stop())
	}
}

// run is start for a part of the stack that ends with its node.
func (s *Stack) run(ctx context.Context, up func(), into **Node, name, adminAddr string, build func(*Node, deps) (service, error)) error {
	n, err := s.start(ctx, name, adminAddr, build)
	if err != nil {
		return err
	}
	*into = n
	up()
	select {
	case <-ctx.Done():
		return n.Stop()
	case <-n.done:
		return n.err
	}
}

// awaitReady asks a service until it is ready.
func awaitReady(ctx context.Context, svc service) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := svc.Ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not ready: %w", err)
		case <-tick.C:
		}
	}
}

// Package bustest gives tests a real NATS server of their own, in their
// process: JetStream on disk, every message synced, stopped and started at will.
package bustest

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/embedded"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// Server is a NATS server that a test can stop and start on the same store.
type Server struct {
	t   testing.TB
	cfg embedded.Config

	mu    sync.Mutex
	now   *embedded.Server // nil while stopped
	buses []*bus.Bus
}

// Option changes what Start starts.
type Option func(*embedded.Config)

// Listen makes the server listen on a free loopback port, which it keeps over
// restarts; without it only Bus reaches the server.
func Listen() Option {
	return func(c *embedded.Config) { c.Port = -1 }
}

// ConfigFile gives the server a nats-server configuration (users, permissions).
func ConfigFile(path string) Option {
	return func(c *embedded.Config) { c.ConfigFile = path }
}

// Start runs a server until the test ends.
func Start(t testing.TB, opts ...Option) *Server {
	t.Helper()
	cfg := embedded.Config{StoreDir: t.TempDir(), Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel)}
	for _, opt := range opts {
		opt(&cfg)
	}
	s := &Server{t: t, cfg: cfg}
	s.Restart()
	t.Cleanup(s.Stop)
	return s
}

// Stop shuts the server down. When it returns, every Bus of this server has
// noticed, so that Connected tells of the next server only.
func (s *Server) Stop() {
	s.mu.Lock()
	now, buses := s.now, s.buses
	s.now = nil
	s.mu.Unlock()
	if now == nil {
		return
	}
	now.Shutdown()
	unaware := func(b *bus.Bus) bool { return b.Connected() }
	for deadline := time.Now().Add(10 * time.Second); slices.ContainsFunc(buses, unaware); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Error("bustest: a Bus thinks it is connected to a server that is gone")
			return
		}
	}
}

// Restart stops the server if it runs and starts it on the same store.
func (s *Server) Restart() {
	s.t.Helper()
	s.Stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	now, err := embedded.Start(s.cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	s.now = now
	if s.cfg.Port == -1 {
		_, port, err := net.SplitHostPort(now.URL()[len("nats://"):])
		if err == nil {
			s.cfg.Port, err = net.LookupPort("tcp", port)
		}
		if err != nil {
			s.t.Fatal(err)
		}
	}
}

// Backup keeps what a stopped server has stored; restore puts it back, as of then, into a server that is
// stopped again.
func (s *Server) Backup() (restore func()) {
	s.t.Helper()
	copied := s.t.TempDir()
	if err := os.CopyFS(copied, os.DirFS(s.cfg.StoreDir)); err != nil {
		s.t.Fatal(err)
	}
	return func() {
		s.t.Helper()
		err := os.RemoveAll(s.cfg.StoreDir)
		if err == nil {
			err = os.CopyFS(s.cfg.StoreDir, os.DirFS(copied))
		}
		if err != nil {
			s.t.Fatal(err)
		}
	}
}

// URL is where the server listens; "" without Listen.
func (s *Server) URL() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now == nil {
		return ""
	}
	return s.now.URL()
}

// InProcessConn reaches whichever server runs now.
func (s *Server) InProcessConn() (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now == nil {
		return nil, errors.New("bustest: the server is stopped")
	}
	return s.now.InProcessConn()
}

// Bus connects to the server without a network, until the test ends. A fn
// changes the connection's configuration before.
func (s *Server) Bus(t testing.TB, fn ...func(*bus.Config)) *bus.Bus {
	t.Helper()
	cfg := bus.Config{Name: "test", InProcess: s}
	for _, f := range fn {
		f(&cfg)
	}
	b, err := bus.Connect(t.Context(), cfg, zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.ErrorLevel))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buses = append(s.buses, b)
	return b
}

// Provisioned is Bus, with every stream of the system in place.
func (s *Server) Provisioned(t testing.TB) *bus.Bus {
	t.Helper()
	b := s.Bus(t)
	Await(t, "connection", b.Connected)
	if err := b.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
	return b
}

// DeleteStream removes a stream and all that is in it, as an operator may.
func (s *Server) DeleteStream(t testing.TB, name string) {
	t.Helper()
	conn, err := nats.Connect("", nats.InProcessServer(s))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err == nil {
		err = js.DeleteStream(t.Context(), name)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Await waits until the condition holds, thirty seconds at most.
func Await(t testing.TB, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-ctx.Done():
			t.Fatalf("%s: did not happen within thirty seconds", what)
		case <-tick.C:
		}
	}
}

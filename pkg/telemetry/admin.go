package telemetry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/rs/zerolog"
)

// probeTimeout bounds each probe; one that takes longer has failed.
const probeTimeout = time.Second

// Probe tells whether one thing that a service needs is there, with some detail for people.
type Probe func(ctx context.Context) (detail any, err error)

// Admin serves /healthz, /readyz and /metrics of one service.
type Admin struct {
	addr     string
	server   *http.Server
	draining atomic.Bool
	up       chan struct{} // closed once bound is set

	mu     sync.Mutex
	probes map[string]Probe
	bound  string
}

// NewAdmin gives an Admin that listens on addr once Run runs.
func NewAdmin(addr string, reg *Registry, log zerolog.Logger) *Admin {
	a := &Admin{addr: addr, probes: make(map[string]Probe), up: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", a.readyz)
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	a.server = NewHTTPServer(mux, log)
	return a
}

// AddReadiness makes readiness depend on a probe. Probes run concurrently, at every /readyz.
func (a *Admin) AddReadiness(name string, p Probe) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.probes[name] = p
}

// Drain makes the service not ready from now on, so that balancers turn away
// from it before it stops.
func (a *Admin) Drain() { a.draining.Store(true) }

// Run serves until ctx ends. It runs once.
func (a *Admin) Run(ctx context.Context) error {
	ln, err := net.Listen("tcp", a.addr)
	if err != nil {
		return fmt.Errorf("admin-addr: %w", err)
	}
	a.mu.Lock()
	a.bound = ln.Addr().String()
	a.mu.Unlock()
	close(a.up)
	return Serve(ctx, a.server, ln, time.Second)
}

// Ready waits until Run listens.
func (a *Admin) Ready(ctx context.Context) error {
	select {
	case <-a.up:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Addr is where the Admin listens, or is to listen.
func (a *Admin) Addr() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.bound != "" {
		return a.bound
	}
	return a.addr
}

// readiness is the answer of /readyz.
type readiness struct {
	Ready    bool             `json:"ready"`
	Draining bool             `json:"draining,omitempty"`
	Checks   map[string]check `json:"checks"`
}

type check struct {
	OK     bool   `json:"ok"`
	Detail any    `json:"detail,omitempty"`
	Error  string `json:"error,omitempty"`
}

func (a *Admin) readyz(w http.ResponseWriter, r *http.Request) {
	answer := a.readiness(r.Context())
	body, err := json.MarshalIndent(answer, "", "  ")
	if err != nil {
		http.Error(w, fmt.Sprintf("a probe's detail is no JSON: %v", err), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if !answer.Ready {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	w.Write(append(body, '\n'))
}

func (a *Admin) readiness(ctx context.Context) readiness {
	type result struct {
		name string
		check
	}
	a.mu.Lock()
	results := make(chan result, len(a.probes))
	for name, probe := range a.probes {
		go func() { results <- result{name, run(ctx, probe)} }()
	}
	n := len(a.probes)
	a.mu.Unlock()

	draining := a.draining.Load()
	answer := readiness{Ready: !draining, Draining: draining, Checks: make(map[string]check, n)}
	for range n {
		r := <-results
		answer.Checks[r.name] = r.check
		answer.Ready = answer.Ready && r.OK
	}
	return answer
}

// run asks a probe, and waits no longer than it may take.
func run(ctx context.Context, p Probe) check {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	answer := make(chan check, 1)
	go func() {
		detail, err := p(ctx)
		c := check{OK: err == nil, Detail: detail}
		if err != nil {
			c.Error = err.Error()
		}
		answer <- c
	}()
	select {
	case c := <-answer:
		return c
	case <-ctx.Done():
		err := ctx.Err()
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("no answer within %s", probeTimeout)
		}
		return check{Error: err.Error()}
	}
}

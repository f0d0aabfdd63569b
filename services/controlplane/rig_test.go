package controlplane

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

const token = "correct horse battery staple"

// plane is a running controlplane and its client.
type plane struct {
	*Service
	log     *safeBuffer
	buckets store.Store
	// stop ends the service and waits for it.
	stop func()
}

// safeBuffer takes the log of a service.
type safeBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// examplePolicy is a file that holds the sample policy.
func examplePolicy(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(name, policy.Example(), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func newPlane(t *testing.T, b *bus.Bus, fn ...func(*Config)) *plane {
	t.Helper()
	return newPlaneOn(t, b, nil, fn...)
}

// newPlaneOn is newPlane with a store of buckets.
func newPlaneOn(t *testing.T, b *bus.Bus, buckets store.Store, fn ...func(*Config)) *plane {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Addr, cfg.AdminToken = "127.0.0.1:0", token
	for _, f := range fn {
		f(&cfg)
	}
	p := &plane{log: new(safeBuffer), buckets: buckets}
	s, err := New(cfg, Deps{Bus: b, Store: p.buckets, Log: zerolog.New(p.log), Registry: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	p.Service = s
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	p.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the controlplane does not stop")
		}
	})
	t.Cleanup(p.stop)
	bustest.Await(t, "API", func() bool { return s.addr.Load() != nil })
	return p
}

// startPlane is newPlane with the sample policy in force.
func startPlane(t *testing.T, server *bustest.Server, fn ...func(*Config)) *plane {
	t.Helper()
	file := examplePolicy(t)
	p := newPlane(t, server.Bus(t), append([]func(*Config){func(c *Config) { c.PolicyFile = file }}, fn...)...)
	p.awaitReady(t)
	return p
}

func (p *plane) awaitReady(t *testing.T) {
	t.Helper()
	bustest.Await(t, "readiness", func() bool { _, err := p.Ready(t.Context()); return err == nil })
}

// answered is what a request got.
type answered struct {
	status int
	header http.Header
	body   string
}

func (a answered) problem(t *testing.T) problem {
	t.Helper()
	if kind := a.header.Get("Content-Type"); kind != "application/problem+json" {
		t.Fatalf("got %d %s %s, want a problem", a.status, kind, a.body)
	}
	return decodeJSON[problem](t, []byte(a.body))
}

func decodeJSON[T any](t *testing.T, data []byte) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatalf("%v: %s", err, data)
	}
	return v
}

// do sends a request with the token and JSON's content type, unless header says otherwise ("" removes).
func (p *plane) do(t *testing.T, method, path, body string, header ...string) answered {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+p.Addr()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(tokenHeader, token)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		if header[i+1] == "" {
			r.Header.Del(header[i])
		} else {
			r.Header.Set(header[i], header[i+1])
		}
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	holdToOpenAPI(t, r, resp.StatusCode, resp.Header, string(data))
	return answered{resp.StatusCode, resp.Header, string(data)}
}

func (p *plane) post(t *testing.T, patch string, header ...string) events.ConfigReply {
	t.Helper()
	a := p.do(t, http.MethodPost, "/api/control", patch, header...)
	if a.status != http.StatusOK {
		t.Fatalf("change %s: %d %s", patch, a.status, a.body)
	}
	return decodeJSON[events.ConfigReply](t, []byte(a.body))
}

// config is what GET /api/config answers.
func (p *plane) config(t *testing.T) (events.ConfigVersion, policy.Policy) {
	t.Helper()
	a := p.do(t, http.MethodGet, "/api/config", "")
	if a.status != http.StatusOK {
		t.Fatalf("GET /api/config: %d %s", a.status, a.body)
	}
	v := decodeJSON[events.ConfigVersion](t, []byte(a.body))
	doc, err := policy.Parse(v.Document)
	if err != nil {
		t.Fatal(err)
	}
	return v, doc
}

// stored are the messages of a stream, decoded.
func stored[M any](t *testing.T, b *bus.Bus, stream string, decode func([]byte) (M, error)) []M {
	t.Helper()
	state, err := b.Stream(t.Context(), stream)
	if err != nil {
		t.Fatal(err)
	}
	var all []M
	if state.Msgs == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	err = b.Follow(ctx, stream, bus.All(), func(m bus.Message) error {
		one, err := decode(m.Data)
		if err != nil {
			return err
		}
		if all = append(all, one); m.Seq >= state.Last {
			return io.EOF
		}
		return nil
	})
	if err != io.EOF {
		t.Fatal(err)
	}
	return all
}

func versionsIn(t *testing.T, b *bus.Bus) []events.ConfigVersion {
	t.Helper()
	return stored(t, b, events.StreamConfig, events.Decode[events.ConfigVersion])
}

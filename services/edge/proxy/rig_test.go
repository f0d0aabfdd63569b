package proxy_test

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/framing"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
	"github.com/aegisrate/aegisrate/services/edge/admission"
	"github.com/aegisrate/aegisrate/services/edge/llm"
	"github.com/aegisrate/aegisrate/services/edge/proxy"
)

// rig is an edge's HTTP face on a private port, with a store whose clock stands still.
type rig struct {
	t       testing.TB
	url     string
	addr    string
	engine  *admission.Engine
	llm     *llm.Limiter
	handler *proxy.Handler
	server  *http.Server
	later   *later
	log     *syncBuffer
	metrics *prometheus.Registry

	mu      sync.Mutex
	records []events.Response
	added   chan struct{}
}

// rigConfig is what a test may want different.
type rigConfig struct {
	policy  string
	trusted []netip.Prefix
	store   store.Store
	access  uint32
	cache   int64 // bytes
	server  []telemetry.ServerOption
	body    time.Duration // the time for each part of a request body
	serve   func(*http.Server, net.Listener) error
}

const testTime = 1_700_000_000_000_000 // µs

func newRig(t testing.TB, c rigConfig) *rig {
	t.Helper()
	r := &rig{t: t, later: &later{}, log: &syncBuffer{}, metrics: prometheus.NewRegistry(), added: make(chan struct{}, 1024)}
	frozen := func() int64 { return testTime }
	if c.serve == nil {
		c.serve = framing.Serve
	}
	if c.store == nil {
		c.store = memstore.New(frozen)
	}
	r.engine = &admission.Engine{
		Identifier:  admission.Identifier{Trusted: c.trusted, IPv6Bits: 64},
		Store:       c.store,
		Local:       memstore.New(frozen),
		Clock:       admission.NewStoreClock(time.Now),
		Breaker:     admission.NewBreaker(time.Now, nil),
		Fleet:       admission.NewFleet("this"),
		Multipliers: admission.NewMultipliers(time.Now),
		Sink:        r,
	}
	if c.policy != "" {
		r.use(c.policy)
	}
	still := func() time.Time { return time.UnixMicro(testTime) }
	r.llm = &llm.Limiter{Shared: llm.NewLocal(still), Local: llm.NewLocal(still), Breaker: r.engine.Breaker, Fleet: r.engine.Fleet, Now: still}
	log := zerolog.New(r.log).Level(zerolog.DebugLevel)
	r.handler = proxy.New(proxy.Options{Engine: r.engine, LLM: r.llm, AccessLog: c.access, BodyTimeout: c.body, CacheBytes: c.cache, Deferrals: r.later, Log: log, Registry: r.metrics})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = ln.Addr().String()
	r.url = "http://" + r.addr
	r.server = telemetry.NewHTTPServer(r.handler, log, c.server...)
	go c.serve(r.server, ln)
	t.Cleanup(func() { r.server.Close() })
	return r
}

func (r *rig) use(doc string) {
	r.t.Helper()
	p, err := policy.Parse([]byte(doc))
	if err != nil {
		r.t.Fatal(err)
	}
	table, err := policy.Compile(p, 7)
	if err != nil {
		r.t.Fatal(err)
	}
	r.engine.Use(table)
}

// Add implements admission.Sink.
func (r *rig) Add(rec admission.Record) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.records = append(r.records, rec.Response)
	r.added <- struct{}{}
	return true
}

// event waits for the next finished request and gives it.
func (r *rig) event() events.Response {
	r.t.Helper()
	select {
	case <-r.added:
	case <-time.After(10 * time.Second):
		r.t.Fatal("no event within ten seconds")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.records[0]
	r.records = r.records[1:]
	return e
}

// noEvent fails if a finished request is waiting.
func (r *rig) noEvent() {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.records) > 0 {
		r.t.Fatalf("unexpected event: %+v", r.records[0])
	}
}

// do sends a request and reads the whole answer.
func (r *rig) do(req *http.Request) (*http.Response, string) {
	r.t.Helper()
	res, err := client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return res, string(body)
}

// client keeps no connections, so that servers close without waiting for them.
var client = &http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

func (r *rig) get(path string, header ...string) (*http.Response, string) {
	r.t.Helper()
	return r.do(r.request(http.MethodGet, path, nil, header...))
}

func (r *rig) request(method, path string, body io.Reader, header ...string) *http.Request {
	r.t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, r.url+path, body)
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	return req
}

// raw sends bytes as they are and gives the connection.
func (r *rig) raw(data string) net.Conn {
	r.t.Helper()
	conn, err := net.Dial("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	if _, err := io.WriteString(conn, data); err != nil {
		r.t.Fatal(err)
	}
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	return conn
}

// upstream is a backend on a private port.
func upstream(t testing.TB, h http.HandlerFunc) (url string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: h}
	go s.Serve(ln)
	t.Cleanup(func() { s.Close() })
	return "http://" + ln.Addr().String()
}

// policyFor is a policy with one route, /api, to the upstream; more is put into the route.
func policyFor(url string, more ...string) string {
	return "upstreams: {up: {url: '" + url + "', timeout_seconds: 5}}\n" +
		"routes:\n  api:\n    path: /api\n    upstream: up\n    " + strings.Join(more, "\n    ") + "\n" + users
}

// users has keys "alice" and "root"; root is an admin.
const users = `users:
  alice: {key_hashes: [2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90]}
  root: {admin: true, key_hashes: [4813494d137e1631bba301d5acab6e7bb7aa74ce1185d456565ef51d737677b2]}
`

type problem struct {
	Type       string   `json:"type"`
	Title      string   `json:"title"`
	Status     int      `json:"status"`
	Detail     string   `json:"detail"`
	Violated   []string `json:"violated-policies"`
	Limit      string   `json:"limit"`
	Route      string   `json:"route"`
	Tier       string   `json:"tier"`
	RetryAfter int64    `json:"retry_after"`
	RequestID  string   `json:"request_id"`
}

// problemOf checks that the answer is a problem document with this status, and gives it.
func problemOf(t testing.TB, res *http.Response, body string, status int) problem {
	t.Helper()
	if res.StatusCode != status || res.Header.Get("Content-Type") != "application/problem+json" {
		t.Fatalf("got %d %s: %s, want a problem with status %d", res.StatusCode, res.Header.Get("Content-Type"), body, status)
	}
	var p problem
	if err := json.Unmarshal([]byte(body), &p); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	if p.Status != status || p.Type == "" || p.Title == "" || p.RequestID == "" || p.RequestID != res.Header.Get("X-Request-Id") {
		t.Fatalf("incomplete problem: %+v", p)
	}
	return p
}

type syncBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

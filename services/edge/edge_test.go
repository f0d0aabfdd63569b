package edge_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge"
)

// A policy published on NATS is in force within a second, and so is its change.
func TestPolicyFromNATS(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	r := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)})
	if res := r.get("/api"); res.StatusCode != http.StatusServiceUnavailable || res.Header.Get("Retry-After") == "" {
		t.Errorf("without a policy: %s", res.Status)
	}
	if _, err := r.ready(); err == nil {
		t.Error("ready without a policy")
	}
	url := backend(t)
	for _, capacity := range []int64{5, 50} {
		published := time.Now()
		r.awaitVersion(publish(t, b, policyFor(t, url, capacity)))
		if took := time.Since(published); took > time.Second {
			t.Errorf("capacity %d in force after %v", capacity, took)
		}
		if res := r.get("/api"); res.Header.Get("RateLimit-Limit") != fmt.Sprint(capacity) {
			t.Errorf("limit %s, want %d", res.Header.Get("RateLimit-Limit"), capacity)
		}
	}
}

// Case 32: a version that can't be used is refused whole and counted; unknown keys are
// dropped and counted. Case 31: a version that changes nothing refills nobody.
func TestBadPolicyKeepsTheLastGood(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	r := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)})
	good := policyFor(t, backend(t), 5)
	version := publish(t, b, good)
	r.awaitVersion(version)
	for range 5 {
		r.get("/api")
	}
	doc, err := policy.Encode(good)
	if err != nil {
		t.Fatal(err)
	}
	bad := []string{
		`{"routes": {"api": {"path": "/api", "upstream": "nowhere"}}}`,
		strings.Replace(string(doc), `"capacity":5`, `"capacity":0`, 1),
		strings.Replace(string(doc), `"capacity":5`, `"capacity":1e309`, 1),
		strings.Replace(string(doc), `"capacity":5`, `"capacity":"NaN"`, 1),
		`[]`, `"x"`,
	}
	for _, doc := range bad {
		publishDocument(t, b, json.RawMessage(doc))
	}
	if _, err := b.Publish(t.Context(), events.SubjectConfigUpdates, []byte("garbage")); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "refusals", func() bool { return r.metric("aegis_edge_policy_rejected_total") == float64(len(bad)+1) })
	if d, err := r.ready(); err != nil || d.PolicyVersion != version {
		t.Errorf("%+v, %v; want version %d kept", d, err, version)
	}

	newer := strings.Replace(string(doc), `{`, `{"invented_later": {"a": 1},`, 1)
	r.awaitVersion(publishDocument(t, b, json.RawMessage(newer)))
	if n := r.metric("aegis_edge_policy_unknown_keys_total"); n != 1 {
		t.Errorf("%v unknown keys counted, want 1", n)
	}
	if res := r.get("/api"); res.StatusCode != http.StatusAccepted || res.Header.Get("RateLimit-Remaining") != "0" {
		t.Errorf("after no-op versions: %s, remaining %s; want the bucket as empty as before", res.Status, res.Header.Get("RateLimit-Remaining"))
	}
}

// An edge that starts without NATS serves by the last good policy it had, else by its
// policy file, else not at all; NATS takes over when it comes.
func TestStartWithoutNATS(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	dir := t.TempDir()
	in := func(c *edge.Config) { c.DataDir = dir }
	first := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)}, in)
	url := backend(t)
	version := publish(t, b, policyFor(t, url, 5))
	first.awaitVersion(version)
	bustest.Await(t, "snapshot", func() bool { _, err := os.Stat(filepath.Join(dir, "policy.snapshot.json")); return err == nil })
	first.stop()
	s.Stop()

	b = s.Bus(t) // to a server that is away
	second := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)}, in)
	if d, err := second.ready(); err != nil || d.PolicyVersion != version || d.NATS {
		t.Errorf("from the snapshot: %+v, %v", d, err)
	}
	if res := second.get("/api"); res.StatusCode != 200 || res.Header.Get("RateLimit-Limit") != "5" {
		t.Errorf("from the snapshot: %s", res.Status)
	}
	s.Restart()
	other := s.Bus(t)
	bustest.Await(t, "connection", other.Connected)
	second.awaitVersion(publish(t, other, policyFor(t, url, 6)))
	second.stop()
	s.Stop()

	// A damaged snapshot is no policy; then the file's counts.
	if err := os.WriteFile(filepath.Join(dir, "policy.snapshot.json"), []byte(`{"stream":"x","config":{`), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "policy.yaml")
	doc, err := policy.Encode(policyFor(t, url, 9))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, doc, 0o600); err != nil {
		t.Fatal(err)
	}
	third := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)}, in, func(c *edge.Config) { c.PolicyFile = file })
	if res := third.get("/api"); res.StatusCode != 200 || res.Header.Get("RateLimit-Limit") != "9" {
		t.Errorf("from the policy file: %s, limit %s", res.Status, res.Header.Get("RateLimit-Limit"))
	}
	third.stop()

	fourth := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)}, in)
	if res := fourth.get("/api"); res.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("from nothing: %s", res.Status)
	}
}

func TestUnusablePolicyFileIsAnError(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte("routes: {a: {path: /a, upstream: nowhere}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := edge.DefaultConfig()
	cfg.ID, cfg.Addr, cfg.DataDir, cfg.PolicyFile = "e", "127.0.0.1:0", t.TempDir(), file
	_, err := edge.New(cfg, edge.Deps{Bus: bustest.Start(t).Bus(t), Store: memstore.New(nil), Log: zerolog.Nop(), Registry: newRegistry()})
	if err == nil || !strings.Contains(err.Error(), "routes.a.upstream") || !strings.Contains(err.Error(), file) {
		t.Errorf("%v; want it to name the file and the path", err)
	}
}

// A version that is not numbered by its place in the stream is refused; a stream made anew counts anew, and edges follow it.
func TestConfigStreamMadeAnew(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	r := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)})
	url := backend(t)
	for capacity := range int64(5) {
		publish(t, b, policyFor(t, url, 10+capacity))
	}
	r.awaitVersion(5)
	for _, number := range []uint64{2, 1 << 60} { // an edge that took the second would take none after it
		forged, err := events.Encode(events.ConfigVersion{Version: number, By: "test", Via: "file", Time: time.Now(), Document: encode(t, policyFor(t, url, 99))})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Publish(t.Context(), events.SubjectConfigUpdates, forged); err != nil {
			t.Fatal(err)
		}
	}
	bustest.Await(t, "refusals", func() bool { return r.metric("aegis_edge_policy_rejected_total") == 2 })
	if d, _ := r.ready(); d.PolicyVersion != 5 {
		t.Errorf("version %d after forged ones, want 5", d.PolicyVersion)
	}
	publish(t, b, policyFor(t, url, 20))
	r.awaitVersion(8)

	s.DeleteStream(t, events.StreamConfig)
	if err := b.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
	if version := publish(t, b, policyFor(t, url, 30)); version != 1 {
		t.Fatalf("version %d in a new stream", version)
	}
	r.awaitVersion(1)
	if res := r.get("/api"); res.Header.Get("RateLimit-Limit") != "30" {
		t.Errorf("limit %s", res.Header.Get("RateLimit-Limit"))
	}
}

// M reaches every edge within two seconds, also one that starts later, and no tick that is
// no health tick does any harm.
func TestMultiplierFromNATS(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	publish(t, b, policyFor(t, backend(t), 20))
	first := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)})
	first.awaitVersion(1)
	if _, err := b.Publish(t.Context(), events.SubjectHealth("up"), []byte("garbage")); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "refusal", func() bool { return first.metric("aegis_edge_health_rejected_total") == 1 })
	tick(t, b, 1, fifth)
	for name, r := range map[string]*rig{"running": first, "started later": start(t, edge.Deps{Bus: b, Store: memstore.New(nil)})} {
		began := time.Now()
		bustest.Await(t, "multiplier", func() bool { d, _ := r.ready(); return d.Multipliers["up"] == fifth })
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("%s: after %v", name, took)
		}
		if res := r.get("/api"); res.Header.Get("RateLimit-Limit") != "4" || res.Header.Get("X-RateLimit-Adaptive-Multiplier") != "0.2" {
			t.Errorf("%s: headers %v", name, res.Header)
		}
	}
	tick(t, b, 2, bucket.One)
	bustest.Await(t, "recovery", func() bool { d, _ := first.ready(); return d.Multipliers == nil })
}

// Stopping finishes what is under way, publishes every event and says goodbye; nothing is lost or doubled.
func TestCleanStop(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	var left atomic.Bool
	sub, err := s.Bus(t).Subscribe(events.AllHeartbeats, func(m bus.Message) {
		h, err := events.Decode[events.Heartbeat](m.Data)
		if err == nil && h.Leaving && h.Queued == 0 {
			left.Store(true)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Stop()
	release, serving := make(chan struct{}), make(chan struct{}, 100)
	up := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { serving <- struct{}{}; <-release }))
	t.Cleanup(up.Close)
	r := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)}, func(c *edge.Config) { c.DrainWait = 200 * time.Millisecond })
	publish(t, b, policyFor(t, up.URL, 1000))
	r.awaitVersion(1)

	const n = 50
	var ok atomic.Int64
	var clients sync.WaitGroup
	for range n {
		clients.Go(func() {
			if res, err := client.Get(r.url + "/api"); err == nil {
				res.Body.Close()
				if res.StatusCode == 200 {
					ok.Add(1)
				}
			}
		})
	}
	for range n {
		<-serving
	}
	stopped := make(chan struct{})
	go func() { r.stop(); close(stopped) }()
	bustest.Await(t, "not ready", func() bool { _, err := r.ready(); return err != nil })
	if conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://")); err != nil {
		t.Error("no connections taken although balancers have not turned away yet")
	} else {
		conn.Close()
	}
	close(release)
	clients.Wait()
	<-stopped
	if err := <-r.stopped; err != nil {
		t.Errorf("Run: %v", err)
	}
	if ok.Load() != n {
		t.Errorf("%d of %d requests under way were served", ok.Load(), n)
	}
	ids := make(map[string]int)
	for i, batch := range responses(t, b) {
		if batch.N != uint64(i+1) || batch.Boot != r.service.Boot() {
			t.Errorf("batch %d has n %d, boot %s", i, batch.N, batch.Boot)
		}
		for _, e := range batch.Events {
			ids[e.ID]++
		}
	}
	if len(ids) != n {
		t.Errorf("%d events of %d requests", len(ids), n)
	}
	bustest.Await(t, "last heartbeat", left.Load)
}

// The request path never waits for NATS: with a server that took the connection and then
// hangs, requests are as quick as ever, and what they report is published once it is back.
func TestNATSHangs(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t, bustest.Listen())
	direct := s.Provisioned(t)
	link := newLink(t, strings.TrimPrefix(s.URL(), "nats://"))
	b, err := bus.Connect(t.Context(), bus.Config{Name: "edge", URL: "nats://" + link.addr}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	r := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)})
	publish(t, direct, policyFor(t, backend(t), 1000))
	r.awaitVersion(1)
	const n = 100
	ask := func() time.Duration {
		began := time.Now()
		for range n {
			if res := r.get("/api"); res.StatusCode != 200 {
				t.Fatal(res.Status)
			}
		}
		return time.Since(began)
	}
	usual := ask()
	bustest.Await(t, "published events", func() bool { return r.metric("aegis_edge_events_published_total") == n })
	link.freeze()
	// One request that waited for NATS would take its timeout, of seconds; all of them, minutes.
	if took := ask(); took > 10*usual+2*time.Second {
		t.Errorf("%d requests took %v, and %v while NATS hung", n, usual, took)
	}
	bustest.Await(t, "queued events", func() bool { return r.metric("aegis_edge_events_queued") > n/2 })
	link.thaw()
	bustest.Await(t, "published events", func() bool { return r.metric("aegis_edge_events_published_total") == 2*n })
	if lost := r.metric("aegis_edge_events_lost_total"); lost != 0 {
		t.Errorf("%v events lost", lost)
	}
	events := 0
	for _, batch := range responses(t, direct) {
		events += len(batch.Events)
	}
	if events != 2*n {
		t.Errorf("%d events in the log, want %d", events, 2*n)
	}
}

// What exceeds the bound of the queue is lost, and counted.
func TestQueueIsBounded(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	r := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)}, func(c *edge.Config) {
		c.MaxQueued, c.SpoolBytes, c.FlushTimeout = 10, 0, 100*time.Millisecond
	})
	publish(t, b, policyFor(t, backend(t), 1000))
	r.awaitVersion(1)
	s.Stop()
	for range 25 {
		r.get("/api")
	}
	bustest.Await(t, "losses", func() bool { return r.metric("aegis_edge_events_lost_total") == 15 })
	r.stop()
	if err := <-r.stopped; err == nil {
		t.Error("stopping with events unpublished must not pass for clean")
	}
}

// An edge is stopped while NATS is away, its requests still unpublished. The next one with its data
// directory publishes them in its name.
func TestSpoolOutlivesTheEdge(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	publish(t, b, policyFor(t, backend(t), 1000))
	dir := filepath.Join(t.TempDir(), "edge")
	in := func(c *edge.Config) { c.DataDir, c.FlushTimeout = dir, 100*time.Millisecond }
	first := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)}, in)
	first.awaitVersion(1)
	s.Stop()
	const n = 25
	for range n {
		first.get("/api")
	}
	bustest.Await(t, "the spool", func() bool {
		d, err := first.ready()
		return err == nil && d.Queued == n && d.SpoolBytes > 0 && !d.SpoolFull
	})
	first.stop()
	if err := <-first.stopped; err == nil || first.metric("aegis_edge_events_lost_total") != 0 {
		t.Errorf("stopped with %v, %v events lost", err, first.metric("aegis_edge_events_lost_total"))
	}

	second := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)}, in)
	s.Restart()
	bustest.Await(t, "published events", func() bool { return second.metric("aegis_edge_events_published_total") == n })
	events := 0
	for _, batch := range responses(t, b) {
		if batch.Boot != first.service.Boot() {
			t.Errorf("a batch of boot %s, want %s", batch.Boot, first.service.Boot())
		}
		events += len(batch.Events)
	}
	if events != n {
		t.Errorf("%d events in the log, want %d", events, n)
	}
}

// Heartbeats tell of each edge, and edges count each other.
func TestEdgesCountEachOther(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	beats := make(chan events.Heartbeat, 100)
	sub, err := s.Bus(t).Subscribe(events.AllHeartbeats, func(m bus.Message) {
		if h, err := events.Decode[events.Heartbeat](m.Data); err == nil {
			beats <- h
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Stop()
	publish(t, b, policyFor(t, backend(t), 5))
	named := func(id string) func(*edge.Config) { return func(c *edge.Config) { c.ID = id } }
	first := start(t, edge.Deps{Bus: s.Bus(t), Store: memstore.New(nil)}, named("first"))
	second := start(t, edge.Deps{Bus: s.Bus(t), Store: memstore.New(nil)}, named("second"))
	for _, r := range []*rig{first, second} {
		bustest.Await(t, "two edges", func() bool { d, _ := r.ready(); return d.LiveEdges == 2 })
	}
	first.awaitVersion(1)
	for range 7 {
		first.get("/api")
	}
	var green, yellow, red uint64
	for green+yellow+red < 7 {
		select {
		case h := <-beats:
			if h.Edge == "first" {
				green, yellow, red = green+h.Green, yellow+h.Yellow, red+h.Red
			}
		case <-time.After(10 * time.Second):
			t.Fatal("no heartbeat")
		}
	}
	if green != 5 || yellow != 1 || red != 1 {
		t.Errorf("tiers %d, %d, %d", green, yellow, red)
	}
	second.stop()
	bustest.Await(t, "one edge", func() bool { d, _ := first.ready(); return d.LiveEdges == 1 })
}

func TestConfig(t *testing.T) {
	t.Parallel()
	good := edge.DefaultConfig()
	good.ID = "edge-1"
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for field, change := range map[string]func(*edge.Config){
		"id":             func(c *edge.Config) { c.ID = "Edge.1" },
		"addr":           func(c *edge.Config) { c.Addr = "" },
		"data-dir":       func(c *edge.Config) { c.DataDir = "" },
		"ipv6-prefix":    func(c *edge.Config) { c.IPv6Prefix = 129 },
		"write-timeout":  func(c *edge.Config) { c.WriteTimeout = 0 },
		"cache-bytes":    func(c *edge.Config) { c.CacheBytes = -1 },
		"body-timeout":   func(c *edge.Config) { c.BodyTimeout = 0 },
		"max-queued":     func(c *edge.Config) { c.MaxQueued = 0 },
		"spool-bytes":    func(c *edge.Config) { c.SpoolBytes = -1 },
		"drain-timeout":  func(c *edge.Config) { c.DrainTimeout = -1 },
		"tls-key-file":   func(c *edge.Config) { c.TLSCertFile = "cert.pem" },
		"tls-cert-file":  func(c *edge.Config) { c.TLSKeyFile = "key.pem" },
		"proxy-protocol": func(c *edge.Config) { c.ProxyProtocol = true },
	} {
		c := good
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestPortInUse(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	cfg := edge.DefaultConfig()
	cfg.ID, cfg.Addr, cfg.DataDir = "e", ln.Addr().String(), t.TempDir()
	_, err = edge.New(cfg, edge.Deps{Bus: bustest.Start(t).Bus(t), Store: memstore.New(nil), Log: zerolog.Nop(), Registry: newRegistry()})
	if err == nil || !strings.Contains(err.Error(), "addr") {
		t.Errorf("%v", err)
	}
}

// link is a TCP proxy that can freeze: connections stay open, and nothing passes.
type link struct {
	addr string
	mu   sync.Mutex
	open chan struct{} // closed while bytes pass
}

func newLink(t *testing.T, to string) *link {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &link{addr: ln.Addr().String(), open: make(chan struct{})}
	close(l.open)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); ln.Close(); l.thaw() })
	go func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			context.AfterFunc(ctx, func() { in.Close(); out.Close() })
			go l.copy(out, in)
			go l.copy(in, out)
		}
	}()
	return l
}

func (l *link) copy(dst, src net.Conn) {
	defer dst.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		l.mu.Lock()
		open := l.open
		l.mu.Unlock()
		<-open
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				return
			}
			return
		}
	}
}

func (l *link) freeze() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = make(chan struct{})
}

func (l *link) thaw() {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.open:
	default:
		close(l.open)
	}
}

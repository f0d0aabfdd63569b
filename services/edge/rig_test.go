package edge_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge"
)

// rig is a running edge.
type rig struct {
	t       testing.TB
	service *edge.Service
	url     string
	metrics *prometheus.Registry
	stop    func()
	stopped chan error
}

// start runs an edge until the test ends or stop is called.
func start(t testing.TB, deps edge.Deps, change ...func(*edge.Config)) *rig {
	t.Helper()
	cfg := edge.DefaultConfig()
	cfg.ID, cfg.Addr, cfg.DataDir = "edge-test", "127.0.0.1:0", filepath.Join(t.TempDir(), "edge")
	cfg.FlushTimeout = 2 * time.Second
	for _, f := range change {
		f(&cfg)
	}
	r := &rig{t: t, metrics: prometheus.NewRegistry(), stopped: make(chan error, 1)}
	deps.Registry = r.metrics
	deps.Log = zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.FatalLevel)
	var err error
	if r.service, err = edge.New(cfg, deps); err != nil {
		t.Fatal(err)
	}
	r.url = "http://" + r.service.Addr()
	ctx, cancel := context.WithCancel(context.Background())
	go func() { r.stopped <- r.service.Run(ctx) }()
	over := false
	r.stop = func() {
		if over {
			return
		}
		over = true
		cancel()
		select {
		case err := <-r.stopped:
			r.stopped <- err
		case <-time.After(20 * time.Second):
			t.Error("the edge did not stop")
		}
	}
	t.Cleanup(r.stop)
	return r
}

var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}

func (r *rig) get(path string, header ...string) *http.Response {
	r.t.Helper()
	req, err := http.NewRequest(http.MethodGet, r.url+path, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	res, err := client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		r.t.Fatal(err)
	}
	return res
}

func (r *rig) ready() (edge.Detail, error) {
	d, err := r.service.Ready(r.t.Context())
	return d.(edge.Detail), err
}

// awaitVersion waits until the edge obeys a version of the policy.
func (r *rig) awaitVersion(version uint64) {
	r.t.Helper()
	bustest.Await(r.t, "policy version", func() bool {
		d, err := r.ready()
		return err == nil && d.PolicyVersion == version
	})
}

func newRegistry() *prometheus.Registry { return prometheus.NewRegistry() }

// metric is the sum of a metric over its labels.
func (r *rig) metric(name string) float64 {
	r.t.Helper()
	families, err := r.metrics.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// backend is an upstream that answers 200 and its path.
func backend(t testing.TB) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.URL.Path) }))
	t.Cleanup(s.Close)
	return s.URL
}

// policyFor has a route /api to url with this capacity, and a refill too slow to matter.
func policyFor(t testing.TB, url string, capacity int64) policy.Policy {
	t.Helper()
	p, err := policy.Parse([]byte(`
upstreams: {up: {url: "` + url + `"}}
routes: {api: {path: /api, upstream: up, capacity: 20, refill_rate: 0.001}}
`))
	if err != nil {
		t.Fatal(err)
	}
	api := p.Routes["api"]
	api.Capacity = capacity
	p.Routes["api"] = api
	return p
}

// publish appends a version to the config stream and gives its number.
func publish(t testing.TB, b *bus.Bus, p policy.Policy) uint64 {
	t.Helper()
	return publishDocument(t, b, encode(t, p))
}

func encode(t testing.TB, p policy.Policy) json.RawMessage {
	t.Helper()
	doc, err := policy.Encode(p)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func publishDocument(t testing.TB, b *bus.Bus, doc json.RawMessage) uint64 {
	t.Helper()
	state, err := b.Stream(t.Context(), events.StreamConfig)
	if err != nil {
		t.Fatal(err)
	}
	data, err := events.Encode(events.ConfigVersion{Version: state.Last + 1, By: "test", Via: "file", Time: time.Now(), Document: doc})
	if err != nil {
		t.Fatal(err)
	}
	seq, err := b.Publish(t.Context(), events.SubjectConfigUpdates, data)
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

// tick publishes a multiplier for the upstream "up".
func tick(t testing.TB, b *bus.Bus, n uint64, multiplier int64) {
	t.Helper()
	data, err := events.Encode(events.Health{Upstream: "up", Tick: n, Multiplier: multiplier, By: "test"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Publish(t.Context(), events.SubjectHealth("up"), data); err != nil {
		t.Fatal(err)
	}
}

// responses collects what is in the event log, in order.
func responses(t testing.TB, b *bus.Bus) []events.ResponseBatch {
	t.Helper()
	state, err := b.Stream(t.Context(), events.StreamResponses)
	if err != nil {
		t.Fatal(err)
	}
	if state.Msgs == 0 {
		return nil
	}
	var batches []events.ResponseBatch
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	b.Follow(ctx, events.StreamResponses, bus.All(), func(m bus.Message) error {
		batch, err := events.Decode[events.ResponseBatch](m.Data)
		if err != nil {
			t.Error(err)
		}
		batches = append(batches, batch)
		if m.Seq >= state.Last {
			cancel()
		}
		return nil
	})
	return batches
}

// fifth is a multiplier of 0.2.
const fifth = bucket.One / 5

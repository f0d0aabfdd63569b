package edge_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/redisstore"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge"
)

// think is what a client of a flood waits between its requests: it is Redis that is to be in trouble, not the machine.
const think = 60 * time.Millisecond

// redisTimeout is longer than an edge's own 20 ms: on a busy machine those alone would open the breaker.
var redisTimeout = flag.Duration("redis-timeout", 250*time.Millisecond, "how long the edge of TestRedisOutagesUnderLoad waits for Redis")

// flood asks an edge over 64 connections at once for requests that nothing but trouble would refuse.
type flood struct {
	mu    sync.Mutex
	took  []time.Duration
	wrong map[int]int
	n     atomic.Int64
}

func (r *rig) flood(t *testing.T) *flood {
	t.Helper()
	f := &flood{wrong: map[int]int{}}
	ctx, cancel := context.WithCancel(context.Background())
	var clients sync.WaitGroup
	tr := &http.Transport{MaxIdleConnsPerHost: 64}
	for range 64 {
		clients.Go(func() {
			for ctx.Err() == nil {
				req, err := http.NewRequest(http.MethodGet, r.url+"/api", nil)
				if err != nil {
					t.Error(err)
					return
				}
				began := time.Now()
				status := 0 // no answer
				if res, err := tr.RoundTrip(req); err == nil {
					io.Copy(io.Discard, res.Body)
					res.Body.Close()
					status = res.StatusCode
				}
				f.add(status, time.Since(began))
				time.Sleep(think)
			}
		})
	}
	t.Cleanup(func() {
		cancel()
		clients.Wait()
		tr.CloseIdleConnections()
	})
	return f
}

func (f *flood) add(status int, took time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.took = append(f.took, took)
	if status != http.StatusOK {
		f.wrong[status]++
	}
	f.n.Add(1)
}

// phase waits until about n more requests were answered and gives their p99.
func (f *flood) phase(t *testing.T, n int64) time.Duration {
	t.Helper()
	f.mu.Lock()
	f.took = nil
	f.mu.Unlock()
	till := f.n.Load() + n
	bustest.Await(t, "answers", func() bool { return f.n.Load() >= till })
	f.mu.Lock()
	defer f.mu.Unlock()
	slices.Sort(f.took)
	return f.took[len(f.took)*99/100]
}

// outage is a fault of Redis and its end.
type outage struct {
	begin, end func(t *testing.T, redis *redistest.Server, gate *bustest.Proxy)
}

var outages = map[string]outage{
	"killed": {
		func(t *testing.T, redis *redistest.Server, _ *bustest.Proxy) { redis.Kill(t) },
		func(t *testing.T, redis *redistest.Server, _ *bustest.Proxy) { redis.Restart(t) },
	},
	"black-holed": {
		func(_ *testing.T, _ *redistest.Server, gate *bustest.Proxy) { gate.Stall() },
		func(_ *testing.T, _ *redistest.Server, gate *bustest.Proxy) { gate.Heal() },
	},
	"slow": {
		func(_ *testing.T, _ *redistest.Server, gate *bustest.Proxy) { gate.Delay(300 * time.Millisecond) },
		func(_ *testing.T, _ *redistest.Server, gate *bustest.Proxy) { gate.Delay(0) },
	},
}

// suffer runs an outage under a flood, and tells how the edge took it: p99 before, p99 in the outage from
// its first moment on, and how long the edge took to go on alone and to come back.
func (o outage) suffer(t *testing.T, n int64) (before, during, degraded, back time.Duration) {
	t.Helper()
	b := bustest.Start(t).Provisioned(t)
	redis := redistest.Start(t)
	gate := bustest.NewProxy(t, redis.Addr)
	st, err := redisstore.New(redisstore.Options{Addrs: []string{gate.Addr()}, Timeout: *redisTimeout})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	p := policyFor(t, backend(t), 100_000_000)
	p.LeaseSize = new(int64) // each request asks Redis
	publish(t, b, p)
	r := start(t, edge.Deps{Bus: b, Store: st, Ping: st.Ping})
	r.awaitVersion(1)
	state := func() string { d, _ := r.ready(); return d.Store }
	f := r.flood(t)
	f.phase(t, n/4) // to warm up
	bustest.Await(t, "a calm start", func() bool { return state() == "closed" })
	before = f.phase(t, n)

	began := time.Now()
	o.begin(t, redis, gate)
	opened := make(chan time.Duration, 1)
	go func() {
		for state() != "open" && time.Since(began) < 20*time.Second {
			time.Sleep(time.Millisecond)
		}
		opened <- time.Since(began)
	}()
	during = f.phase(t, n)
	if degraded = <-opened; degraded > 10*time.Second {
		t.Errorf("still not degraded after %v", degraded)
	}
	if d, err := r.ready(); err != nil || !d.Degraded || r.metric("aegis_edge_degraded") != 1 {
		t.Errorf("in the outage: %+v, %v", d, err)
	}
	f.phase(t, n)

	began = time.Now()
	o.end(t, redis, gate)
	bustest.Await(t, "recovery", func() bool { return state() == "closed" })
	back = time.Since(began)
	f.phase(t, n/4)
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.wrong) > 0 {
		t.Errorf("wrong answers by status (0: none): %v of %d", f.wrong, f.n.Load())
	}
	return before, during, degraded, back
}

// Whatever happens to Redis, no request that the limit allows is refused or fails; the edge goes on alone, says so,
// and comes back by itself. TestRedisPaused has the stopped Redis, and the count of what was charged.
func TestRedisOutagesUnderLoad(t *testing.T) {
	t.Parallel()
	for name, o := range outages {
		t.Run("Redis "+name, func(t *testing.T) { // one after the other: each floods the machine
			before, during, degraded, back := o.suffer(t, 800)
			t.Logf("p99 %v before, %v in the outage; degraded after %v, back after %v", before, during, degraded, back)
		})
	}
}

// A Redis without room still debits the clients it knows; new ones that find no room pass by the edge's own count.
func TestRedisFullUnderLoad(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	redis := redistest.Start(t, "--maxmemory-policy", "noeviction")
	st := onRedis(t, redis, 2*time.Second) // a busy machine must not look like a dead Redis here
	p := policyFor(t, backend(t), 100_000_000)
	p.LeaseSize = new(int64)
	publish(t, b, p)
	r := start(t, edge.Deps{Bus: b, Store: st, Ping: st.Ping}, func(c *edge.Config) { c.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")} })
	r.awaitVersion(1)
	r.get("/api")
	if err := redis.Client.ConfigSet(t.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	f := r.flood(t)
	f.phase(t, 1000)
	alone := 0
	for i := range 20 {
		res := r.get("/api", "X-Forwarded-For", fmt.Sprintf("198.51.100.%d", i))
		if res.StatusCode != http.StatusOK {
			t.Errorf("who is new: %s", res.Status)
		}
		if res.Header.Get("X-RateLimit-Degraded") == "true" {
			alone++
		}
		if res := r.get("/api"); res.StatusCode != http.StatusOK || res.Header.Get("X-RateLimit-Degraded") != "" {
			t.Errorf("who is known: %s, degraded %q", res.Status, res.Header.Get("X-RateLimit-Degraded"))
		}
	}
	t.Logf("%d of 20 new clients were decided by the edge alone", alone)
	f.mu.Lock()
	defer f.mu.Unlock()
	if d, err := r.ready(); err != nil || d.Degraded || len(f.wrong) > 0 {
		t.Errorf("%+v, %v; wrong answers %v", d, err, f.wrong)
	}
}

// With Redis and NATS both gone, the last count of live edges stands: the fleet's sum is still the limit.
func TestRedisKilledAndNATSToo(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	redis := redistest.Start(t)
	p := policyFor(t, backend(t), 60)
	api := p.Routes["api"]
	api.Degrade = "off"
	p.Routes["api"] = api
	publish(t, b, p)
	var edges []*rig
	for _, id := range []string{"a", "b", "c"} {
		st := onRedis(t, redis, 0)
		edges = append(edges, start(t, edge.Deps{Bus: s.Bus(t), Store: st, Ping: st.Ping}, func(c *edge.Config) { c.ID = id }))
	}
	for _, r := range edges {
		r.awaitVersion(1)
		bustest.Await(t, "three edges", func() bool { d, _ := r.ready(); return d.LiveEdges == 3 })
	}
	s.Stop()
	redis.Kill(t)
	time.Sleep(4 * time.Second) // longer than an edge counts as live without a beat
	c := load(edges, asked(200))
	c.check(t, "killed")
	if c.total(200) != 60 {
		t.Errorf("%v: the fleet admitted %d of 60", c.status, c.total(200))
	}
	for _, r := range edges {
		if got := r.metric("aegis_edge_fallback_share_tokens"); got != 20 {
			t.Errorf("the declared share is %v tokens, want a third of 60", got)
		}
		if d, _ := r.ready(); d.LiveEdges != 3 || r.metric("aegis_edge_live_edges") != 3 {
			t.Errorf("%d live edges", d.LiveEdges)
		}
	}
}

// In an outage a route does what it chose.
func TestRedisKilledAndRoutesChoose(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	redis := redistest.Start(t)
	p := policyFor(t, backend(t), 5)
	for _, f := range []string{"open", "closed"} {
		route := p.Routes["api"]
		route.Path, route.Fallback = "/"+f, policy.Fallback(f)
		p.Routes[f] = route
	}
	publish(t, b, p)
	st := onRedis(t, redis, 0)
	r := start(t, edge.Deps{Bus: b, Store: st, Ping: st.Ping})
	r.awaitVersion(1)
	redis.Kill(t)
	for i := range 30 {
		if res := r.get("/open"); res.StatusCode != http.StatusOK || res.Header.Get("X-RateLimit-Degraded") != "true" {
			t.Errorf("open, request %d: %s", i, res.Status)
		}
		if res := r.get("/closed"); res.StatusCode != http.StatusServiceUnavailable || res.Header.Get("Retry-After") == "" || res.Header.Get("X-RateLimit-Degraded") != "true" {
			t.Errorf("closed, request %d: %s %v", i, res.Status, res.Header)
		}
	}
	if r.metric("aegis_edge_open_decisions_total") < 20 || r.metric("aegis_edge_closed_decisions_total") != 30 {
		t.Errorf("%v open, %v closed", r.metric("aegis_edge_open_decisions_total"), r.metric("aegis_edge_closed_decisions_total"))
	}
}

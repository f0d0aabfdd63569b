package stack

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/cmd/aegis/upstream"
	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redisstore"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/embedded"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// still is a refill rate that gives nothing back while a test runs: a micro-token a second.
const still = 0.000001

func TestHeadersAndTiers(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t, func(p *policy.Policy) { eachRoute(p, func(r *policy.Route) { r.RefillRate = still }) }))
	edge := s.Edges()[0]

	for i := range 20 {
		a := get(t, edge, "/api/fast", "demo-enterprise")
		want := map[string]string{
			"RateLimit-Limit": "20", "RateLimit-Remaining": strconv.Itoa(19 - i), "X-RateLimit-Tier": "green",
			"X-RateLimit-Algorithm": "token_bucket", "Retry-After": "",
		}
		a.check(t, http.StatusOK, want)
		if a.header.Get("RateLimit-Reset") == "" {
			t.Error("no RateLimit-Reset")
		}
		if m, err := strconv.ParseFloat(a.header.Get("X-RateLimit-Adaptive-Multiplier"), 64); err != nil || m != 1 {
			t.Errorf("X-RateLimit-Adaptive-Multiplier = %q, want 1", a.header.Get("X-RateLimit-Adaptive-Multiplier"))
		}
	}
	for range 4 { // the grace buffer: a fifth of the capacity
		get(t, edge, "/api/fast", "demo-enterprise").check(t, http.StatusAccepted, map[string]string{"X-RateLimit-Tier": "yellow"})
	}
	red := get(t, edge, "/api/fast", "demo-enterprise")
	red.check(t, http.StatusTooManyRequests, map[string]string{
		"X-RateLimit-Tier": "red", "RateLimit-Remaining": "0", "Content-Type": "application/problem+json",
	})
	if after, err := strconv.Atoi(red.header.Get("Retry-After")); err != nil || after < 1 {
		t.Errorf("Retry-After = %q, want a number of seconds", red.header.Get("Retry-After"))
	}
	var problem struct{ Type, Title string }
	if err := json.Unmarshal(red.body, &problem); err != nil || problem.Type == "" || problem.Title == "" {
		t.Errorf("not a problem document: %s", red.body)
	}
	// Another client, and another route, have buckets of their own.
	get(t, edge, "/api/fast", "demo-growth").check(t, http.StatusOK, map[string]string{"RateLimit-Remaining": "19"})
	get(t, edge, "/api/slow?ms=1", "demo-enterprise").check(t, http.StatusOK, map[string]string{"RateLimit-Remaining": "19"})
}

func TestCostSettlesAndDebtBlocks(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t, func(p *policy.Policy) { eachRoute(p, func(r *policy.Route) { r.RefillRate = still }) }))
	edge := s.Edges()[0]

	get(t, edge, "/api/cost?units=10", "demo-enterprise").check(t, http.StatusOK, map[string]string{"RateLimit-Remaining": "19", "X-Compute-Cost": ""})
	awaitBalance(t, s, "user:demo-enterprise", "cost", 10*bucket.One)

	// A cost that is none is ignored, and the base cost of 1 stays.
	for _, units := range []string{"NaN", "-5", "1e309"} {
		get(t, edge, "/api/cost?units="+units, "demo-growth").check(t, http.StatusOK, nil)
	}
	get(t, edge, "/api/cost?units=5", "demo-growth").check(t, http.StatusOK, nil)
	awaitBalance(t, s, "user:demo-growth", "cost", (20-3-5)*bucket.One)

	// A cost beyond the balance becomes debt, and blocks.
	get(t, edge, "/api/cost?units=30", "demo-enterprise").check(t, http.StatusOK, map[string]string{"RateLimit-Remaining": "9"})
	awaitBalance(t, s, "user:demo-enterprise", "cost", -20*bucket.One)
	get(t, edge, "/api/cost?units=1", "demo-enterprise").check(t, http.StatusTooManyRequests, map[string]string{"RateLimit-Remaining": "0"})

	// Refill clears it: 21 tokens at 10 a second.
	control(t, s, "", `{"routes":{"cost":{"refill_rate":10}}}`, http.StatusOK)
	// The first answers are yellow, since grace pays before the balance is whole again.
	await(t, 10*time.Second, "the debt to be refilled", func() bool {
		return get(t, edge, "/api/cost?units=1", "demo-enterprise").status != http.StatusTooManyRequests
	})
}

func TestUpstreamHealthMovesTheMultiplier(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t, func(p *policy.Policy) {
		eachRoute(p, func(r *policy.Route) { r.Capacity, r.RefillRate = 10_000, 10_000 })
		editSample(p, func(u *policy.Upstream) {
			u.Health.Increase = 0.4 // two steps from the floor to 1
			// Far above what a busy machine takes for a fast answer.
			u.Health.SlowP95Ms, u.Health.FastP95Ms = 3000, 2500
		})
	}))
	second := addEdge(t, s, "edge-2")
	multipliers := func(want float64) func() bool {
		return func() bool {
			for _, e := range []*Node{s.Edges()[0], second} {
				a := get(t, e, "/api/fast", "demo-enterprise")
				if m, err := strconv.ParseFloat(a.header.Get("X-RateLimit-Adaptive-Multiplier"), 64); err != nil || m != want {
					return false
				}
			}
			return true
		}
	}
	await(t, 10*time.Second, "M = 1", multipliers(1))
	set := func(f upstream.Faults) {
		t.Helper()
		if err := s.Upstream().Set(f); err != nil {
			t.Fatal(err)
		}
	}
	set(upstream.Faults{ErrorRate: 1})
	await(t, time.Minute, "M to fall to 0.2 on both edges while the upstream fails", multipliers(0.2))
	set(upstream.Faults{})
	await(t, time.Minute, "M to rise to 1 on both edges once it is well", multipliers(1))
	set(upstream.Faults{LatencyMS: 3500})
	var wg sync.WaitGroup
	for range 30 { // a window of slow samples, without waiting for each
		wg.Go(func() { get(t, second, "/api/fast", "demo-enterprise").check(t, http.StatusOK, nil) })
	}
	wg.Wait()
	await(t, time.Minute, "M to fall while the upstream is slow", multipliers(0.2))
}

func TestChangesReachEveryEdge(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t, nil))
	second := addEdge(t, s, "edge-2")
	limit := func(want string) {
		t.Helper()
		for _, e := range []*Node{s.Edges()[0], second} {
			await(t, soon, "the limit to be "+want, func() bool {
				return get(t, e, "/api/fast", "demo-enterprise").header.Get("RateLimit-Limit") == want
			})
		}
	}
	limit("20")
	control(t, s, "", `{"routes":{"fast":{"capacity":7}}}`, http.StatusOK)
	limit("7")
	command(t, s, "", `{"routes":{"fast":{"capacity":9}}}`)
	limit("9")
	// What is refused changes nothing, not even by half.
	refusal := control(t, s, "", `{"routes":{"fast":{"capacity":3},"slow":{"capacity":-1}}}`, http.StatusBadRequest)
	if !strings.Contains(refusal, "routes.slow.capacity") {
		t.Errorf("the refusal does not name the field: %s", refusal)
	}
	control(t, s, "", `{"algorithm":"sliding_window"}`, http.StatusOK)
	await(t, soon, "the algorithm to be switched", func() bool {
		a := get(t, second, "/api/fast", "demo-enterprise")
		return a.header.Get("X-RateLimit-Algorithm") == "sliding_window"
	})
	control(t, s, "", `{"algorithm":"token_bucket"}`, http.StatusOK)
	limit("9")
}

func TestTokenGuardsChanges(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, nil)
	cfg.AdminToken = "a-token-for-the-test"
	s := start(t, cfg)
	const change = `{"routes":{"fast":{"capacity":7}}}`
	control(t, s, "", change, http.StatusUnauthorized)
	control(t, s, "wrong", change, http.StatusUnauthorized)
	if reply := command(t, s, "", change); reply.Header.Get("Nats-Service-Error-Code") == "" {
		t.Errorf("NATS takes a command without the token: %s", reply.Data)
	}
	if limit := get(t, s.Edges()[0], "/api/fast", "").header.Get("RateLimit-Limit"); limit != "20" {
		t.Errorf("a refused change is in force: limit %s", limit)
	}
	if reply := command(t, s, cfg.AdminToken, change); reply.Header.Get("Nats-Service-Error-Code") != "" {
		t.Errorf("NATS refuses the right token: %v %s", reply.Header, reply.Data)
	}
	await(t, soon, "the change", func() bool {
		return get(t, s.Edges()[0], "/api/fast", "").header.Get("RateLimit-Limit") == "7"
	})
}

func TestEdgeRestartsWithoutControlplane(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t, nil))
	control(t, s, "", `{"routes":{"fast":{"capacity":7}}}`, http.StatusOK)
	first := s.Edges()[0]
	await(t, soon, "the change", func() bool {
		return get(t, first, "/api/fast", "demo-enterprise").header.Get("RateLimit-Limit") == "7"
	})
	if err := s.Controlplane().Stop(); err != nil {
		t.Fatal(err)
	}
	if err := first.Stop(); err != nil {
		t.Fatal(err)
	}
	again := addEdge(t, s, "edge-1")
	get(t, again, "/api/fast", "demo-enterprise").check(t, http.StatusOK, map[string]string{"RateLimit-Limit": "7"})
}

func TestEdgesShareTheLimit(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t, func(p *policy.Policy) { eachRoute(p, func(r *policy.Route) { r.RefillRate = still }) }))
	edges := []*Node{s.Edges()[0], addEdge(t, s, "edge-2"), addEdge(t, s, "edge-3")}
	// A round in which a busy machine made an edge take Redis for gone shows nothing: then
	// each edge decides by its share, which is another test's business. The next round has a new client.
	for round := range 10 {
		client := clientFrom(fmt.Sprintf("127.0.2.%d", round+1))
		var mu sync.Mutex
		statuses, degraded := make(map[int]int), false
		var wg sync.WaitGroup
		for worker := range 6 {
			wg.Go(func() {
				for i := range 15 {
					req, err := http.NewRequest(http.MethodGet, "http://"+edges[(worker+i)%len(edges)].Addr()+"/api/fast", nil)
					if err != nil {
						t.Error(err)
						return
					}
					a := do(t, client, req)
					mu.Lock()
					statuses[a.status]++
					degraded = degraded || a.header.Get("X-RateLimit-Degraded") != ""
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		if degraded {
			continue
		}
		if statuses[http.StatusOK] != 20 || statuses[http.StatusAccepted] != 4 || statuses[http.StatusTooManyRequests] != 66 {
			t.Errorf("three edges gave %v; want 20 green, 4 yellow, 66 red", statuses)
		}
		return
	}
	t.Error("no round without a degraded edge: this machine is too busy to tell")
}

// clientFrom is a client with that source address, which is its identity.
func clientFrom(source string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext:         (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}).DialContext,
		MaxIdleConnsPerHost: 16,
	}}
}

// TestStopSettlesEverything stops a stack in the middle of traffic on two edges, and
// then compares what was asked for with what the event log and Redis hold.
func TestStopSettlesEverything(t *testing.T) {
	t.Parallel()
	redis := privateRedis(t) // one that outlives the stack, to look into
	const capacity = 1_000_000
	cfg := testConfig(t, func(p *policy.Policy) {
		eachRoute(p, func(r *policy.Route) { r.Capacity, r.RefillRate = capacity, still })
		p.LeaseSize = new(int64(0)) // a lease that Redis did not answer for is lost, which is no event
	})
	cfg.Redis = redis.Addr
	s := start(t, cfg)
	edges := []*Node{s.Edges()[0], addEdge(t, s, "edge-2")}

	var mu sync.Mutex
	spent := make(map[string]int64) // client → tokens, by what the upstream said each request costs
	served := 0
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 8 {
		source := fmt.Sprintf("127.0.1.%d", i+1)
		client := clientFrom(source)
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				units := rand.N(int64(20)) + 1
				res, err := client.Get(fmt.Sprintf("http://%s/api/cost?units=%d", edges[n%2].Addr(), units))
				if err != nil {
					return // the edge is gone
				}
				io.Copy(io.Discard, res.Body)
				res.Body.Close()
				if res.StatusCode != http.StatusOK {
					t.Errorf("%s got %d", source, res.StatusCode)
					return
				}
				mu.Lock()
				spent["ip:"+source] += units
				served++
				mu.Unlock()
			}
		})
	}
	await(t, 2*time.Minute, "traffic", func() bool { mu.Lock(); defer mu.Unlock(); return served > 400 })
	if err := s.Stop(); err != nil {
		t.Errorf("not a clean stop: %v", err)
	}
	stop()
	wg.Wait()

	logged, count := costs(t, cfg.DataDir)
	// An answer may be cut off as the edge closes: the event is there and the client did not count it.
	if count < served || count > served+8 {
		t.Errorf("%d events for %d answers", count, served)
	}
	for client := range spent {
		if logged[client].cost < spent[client] {
			t.Errorf("%s: events for %d tokens, answers for %d", client, logged[client].cost, spent[client])
		}
	}
	checkBalances(t, s, capacity, logged)
	t.Logf("%d answers, %d events, %d clients, all settled", served, count, len(spent))
}

// TestStopWaitsForTheSettler stops a stack while its Redis stalls: what the edges decided by
// themselves meanwhile must be in Redis when the stop is over, and not only in the log.
func TestStopWaitsForTheSettler(t *testing.T) {
	t.Parallel()
	redis := privateRedis(t)
	const capacity = 1_000_000
	cfg := testConfig(t, func(p *policy.Policy) {
		eachRoute(p, func(r *policy.Route) { r.Capacity, r.RefillRate = capacity, still })
		p.LeaseSize = new(int64(0)) // a lease that Redis did not answer for is lost, which is no event
	})
	cfg.Redis = redis.Addr
	s := start(t, cfg)
	const path = "/api/cost?units=7"
	get(t, s.Edges()[0], path, "demo-enterprise").check(t, http.StatusOK, nil)
	redis.Stop(t)
	degraded := func() bool {
		a := get(t, s.Edges()[0], path, "demo-enterprise")
		a.check(t, http.StatusOK, nil)
		return a.header.Get("X-RateLimit-Degraded") != ""
	}
	await(t, 20*time.Second, "the edge to decide by itself", degraded)
	for range 20 {
		degraded()
	}
	stopped := make(chan error, 1)
	go func() { stopped <- s.Stop() }()
	await(t, 20*time.Second, "the edge to have stopped", func() bool { return len(s.Edges()) == 0 })
	select {
	case err := <-stopped:
		t.Fatalf("stopped with unsettled events: %v", err)
	case <-time.After(500 * time.Millisecond): // what a stop takes that waits for nobody
	}
	redis.Cont(t)
	if err := <-stopped; err != nil {
		t.Errorf("not a clean stop: %v", err)
	}
	logged, count := costs(t, cfg.DataDir)
	if count < 22 {
		t.Errorf("%d events for 22 answers or more", count)
	}
	checkBalances(t, s, capacity, logged)
}

// TestRestartOnTheSameData holds that a second run finds the policy of the first, and the
// sample upstream at its new place.
func TestRestartOnTheSameData(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, nil)
	s := start(t, cfg)
	control(t, s, "", `{"routes":{"fast":{"capacity":7}}}`, http.StatusOK)
	if s.ReusedPolicy() != 0 {
		t.Errorf("a first run reuses policy %d", s.ReusedPolicy())
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	s = start(t, cfg)
	if s.ReusedPolicy() != 3 {
		t.Errorf("reused policy %d, want 3: imported, changed, pointed to the sample's new port", s.ReusedPolicy())
	}
	get(t, s.Edges()[0], "/api/fast", "demo-enterprise").check(t, http.StatusOK, map[string]string{"RateLimit-Limit": "7"})
}

func TestEmbeddedRedisRunsTheLoop(t *testing.T) {
	t.Parallel()
	redis, err := startMiniredis()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(redis.stop)
	cfg := testConfig(t, func(p *policy.Policy) { eachRoute(p, func(r *policy.Route) { r.RefillRate = still }) })
	cfg.Redis = redis.addr
	s := start(t, cfg)
	get(t, s.Edges()[0], "/api/cost?units=10", "demo-enterprise").check(t, http.StatusOK, map[string]string{"RateLimit-Remaining": "19"})
	awaitBalance(t, s, "user:demo-enterprise", "cost", 10*bucket.One)
}

func TestStartNamesTheFlag(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() })
	addr := taken.Addr().String()
	for flag, set := range map[string]func(*Config){
		"--edge-addr":          func(c *Config) { c.EdgeAddr = addr },
		"--control-addr":       func(c *Config) { c.ControlAddr = addr },
		"--nats-addr":          func(c *Config) { c.NATSAddr = addr },
		"--upstream-addr":      func(c *Config) { c.UpstreamAddr = addr },
		"--settler-admin-addr": func(c *Config) { c.SettlerAdminAddr = addr },
		"--policy":             func(c *Config) { c.Policy = filepath.Join(c.DataDir, "absent.yaml") },
		"--redis":              func(c *Config) { c.Redis = "http://localhost" },
		"AEGIS_ADMIN_TOKEN":    func(c *Config) { c.NATSAddr = "0.0.0.0:0" },
		"--data-dir":           func(c *Config) { c.DataDir = "/dev/null/x" },
	} {
		t.Run(flag, func(t *testing.T) {
			t.Parallel()
			cfg := testConfig(t, nil)
			set(&cfg)
			s, err := Start(t.Context(), cfg)
			if err == nil {
				s.Stop()
				t.Fatal("started")
			}
			if !strings.Contains(err.Error(), flag) {
				t.Errorf("%v: want it to name %s", err, flag)
			}
		})
	}
}

func TestOneStackADirectory(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, nil)
	start(t, cfg)
	if s, err := Start(t.Context(), cfg); err == nil {
		s.Stop()
		t.Error("a second stack started on the same directory")
	} else if !strings.Contains(err.Error(), "--data-dir") {
		t.Errorf("%v: want it to name --data-dir", err)
	}
}

// privateRedis is a server for one test, which may stall it: with arguments redistest never gives a shared one.
func privateRedis(t *testing.T) *redistest.Server { return redistest.Start(t, "--appendonly", "no") }

// testConfig is a stack on free ports in a directory of its own, on the sample policy as edited.
func testConfig(t *testing.T, edit func(*policy.Policy)) Config {
	t.Helper()
	const free = "127.0.0.1:0"
	cfg := Config{
		EdgeAddr: free, ControlAddr: free, NATSAddr: free, UpstreamAddr: free,
		EdgeAdminAddr: free, SettlerAdminAddr: free, HealthwatchAdminAddr: free, ControlAdminAddr: free,
		DataDir: t.TempDir(),
		Log:     zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel),
	}
	p, err := policy.Parse(policy.Example())
	if err != nil {
		t.Fatal(err)
	}
	// A busy machine must not look like a slow upstream to tests that are not about health.
	editSample(&p, func(u *policy.Upstream) { u.Health.SlowP95Ms = 60_000 })
	if edit != nil {
		edit(&p)
	}
	doc, err := policy.Encode(p)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Policy = filepath.Join(t.TempDir(), "policy.json")
	if err := os.WriteFile(cfg.Policy, doc, 0o600); err != nil {
		t.Fatal(err)
	}
	return cfg
}

func editSample(p *policy.Policy, change func(*policy.Upstream)) {
	u := p.Upstreams[sample]
	change(&u)
	p.Upstreams[sample] = u
}

func eachRoute(p *policy.Policy, change func(*policy.Route)) {
	for name, r := range p.Routes {
		change(&r)
		p.Routes[name] = r
	}
}

// start runs a stack until the test ends, and holds that it stops cleanly.
func start(t *testing.T, cfg Config) *Stack {
	t.Helper()
	s, err := Start(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Errorf("not a clean stop: %v", err)
		}
	})
	return s
}

func addEdge(t *testing.T, s *Stack, name string) *Node {
	t.Helper()
	e, err := s.StartEdge(t.Context(), EdgeConfig{Name: name, Addr: "127.0.0.1:0", AdminAddr: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// answer is what a client saw.
type answer struct {
	path   string
	status int
	header http.Header
	body   []byte
}

// get calls an edge as a client with that API key ("" for none).
func get(t *testing.T, edge *Node, path, key string) answer {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, "http://"+edge.Addr()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		req.Header.Set("X-API-Key", key)
	}
	return do(t, http.DefaultClient, req)
}

func do(t *testing.T, client *http.Client, req *http.Request) answer {
	t.Helper()
	res, err := client.Do(req)
	if err != nil {
		t.Error(err)
		return answer{path: req.URL.Path, header: http.Header{}}
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Error(err)
	}
	return answer{path: req.URL.Path, status: res.StatusCode, header: res.Header, body: body}
}

func (a answer) check(t *testing.T, status int, headers map[string]string) {
	t.Helper()
	if a.status != status {
		t.Errorf("%s: %d, want %d: %s", a.path, a.status, status, a.body)
	}
	for name, want := range headers {
		if got := a.header.Get(name); got != want {
			t.Errorf("%s: %s = %q, want %q", a.path, name, got, want)
		}
	}
}

// control sends a change over HTTP and gives the answer's body.
func control(t *testing.T, s *Stack, token, change string, status int) string {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, "http://"+s.Controlplane().Addr()+"/api/control", strings.NewReader(change))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if token != "" {
		req.Header.Set("X-Admin-Token", token)
	}
	a := do(t, http.DefaultClient, req)
	a.check(t, status, nil)
	return string(a.body)
}

// command sends a change over NATS as the stock command line does: over TCP, with a plain client.
func command(t *testing.T, s *Stack, token, change string) *nats.Msg {
	t.Helper()
	conn, err := nats.Connect(s.NATSURL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	msg := nats.NewMsg(events.SubjectConfigCommand)
	msg.Data = []byte(change)
	if token != "" {
		msg.Header.Set("X-Admin-Token", token)
	}
	reply, err := conn.RequestMsg(msg, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return reply
}

// awaitBalance waits until a bucket of the sample policy holds what it should, with what of it is leased given back.
func awaitBalance(t *testing.T, s *Stack, client, scope string, want int64) {
	t.Helper()
	balances, err := redisstore.New(s.redisOptions)
	if err != nil {
		t.Fatal(err)
	}
	defer balances.Close()
	await(t, 10*time.Second, fmt.Sprintf("%s to hold %d on %s", client, want, scope), func() bool {
		got, err := balance(t, balances, client, scope, 20)
		return err == nil && near(got, want)
	})
}

// spending is what a client's events say that it spent, in tokens: cost as the upstream named
// it, and of that the base costs which Redis was asked for and may not have taken.
type spending struct{ cost, unknown int64 }

// costs sums up the event log that a stopped stack left, by client, and counts the events.
func costs(t *testing.T, dataDir string) (byClient map[string]spending, count int) {
	t.Helper()
	byClient = make(map[string]spending)
	for _, batch := range responses(t, dataDir) {
		for _, e := range batch.Events {
			cost, err := strconv.ParseInt(e.ComputeCost, 10, 64)
			if err != nil {
				t.Fatalf("event %s: cost %q", e.ID, e.ComputeCost)
			}
			s := byClient[e.Client]
			s.cost += cost
			for _, c := range e.Charges {
				if c.Scope == "cost" && c.How == events.HowUnknown {
					s.unknown += e.Base / bucket.One
				}
			}
			byClient[e.Client] = s
			count++
		}
	}
	return byClient, count
}

// checkBalances compares the buckets that a stopped stack left in a Redis of the test's
// with what its events cost.
func checkBalances(t *testing.T, s *Stack, capacity int64, byClient map[string]spending) {
	t.Helper()
	balances, err := redisstore.New(s.redisOptions)
	if err != nil {
		t.Fatal(err)
	}
	defer balances.Close()
	for client, spent := range byClient {
		got, err := balance(t, balances, client, "cost", capacity)
		if err != nil {
			t.Fatal(err)
		}
		want := (capacity - spent.cost) * bucket.One
		if !near(got, want) && (got < want || got > want+spent.unknown*bucket.One+1000) {
			t.Errorf("%s: balance %d, want %d by its events, %d tokens of which may not have been taken", client, got, want, spent.unknown)
		}
	}
}

// near allows for the micro-tokens that come back at the rate of still.
func near(got, want int64) bool { return got >= want && got < want+1000 }

// balance peeks at a token bucket that refills at the rate of still.
func balance(t *testing.T, s store.Store, client, scope string, capacity int64) (int64, error) {
	t.Helper()
	spec := bucket.Effective(bucket.Limit{Kind: bucket.TokenBucket, Capacity: capacity, Rate: 1}, bucket.One)
	d, err := s.Check(t.Context(), store.Check{Client: client, Limits: []store.Limit{{Scope: scope, Spec: spec}}})
	if err != nil {
		return 0, err
	}
	return d.Limits[0].Remaining, nil
}

// responses reads the event log that a stopped stack left.
func responses(t *testing.T, dataDir string) []events.ResponseBatch {
	t.Helper()
	server, err := embedded.Start(embedded.Config{StoreDir: filepath.Join(dataDir, "nats"), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Shutdown()
	b, err := bus.Connect(t.Context(), bus.Config{Name: "test", InProcess: server}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	state, err := b.Stream(t.Context(), events.StreamResponses)
	if err != nil {
		t.Fatal(err)
	}
	var batches []events.ResponseBatch
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err = b.Follow(ctx, events.StreamResponses, bus.All(), func(m bus.Message) error {
		batch, err := events.Decode[events.ResponseBatch](m.Data)
		if err != nil {
			return err
		}
		batches = append(batches, batch)
		if m.Seq == state.Last {
			cancel()
		}
		return nil
	})
	if err != nil && ctx.Err() == nil {
		t.Fatal(err)
	}
	if state.Msgs != uint64(len(batches)) {
		t.Fatalf("read %d of %d messages", len(batches), state.Msgs)
	}
	return batches
}

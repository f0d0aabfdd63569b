package edge_test

import (
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redisstore"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge"
)

// onRedis is a store on a Redis, which waits for it as an edge does by default, or for timeout.
func onRedis(t testing.TB, server *redistest.Server, timeout time.Duration) *redisstore.Store {
	t.Helper()
	s, err := redisstore.New(redisstore.Options{Addrs: []string{server.Addr}, Timeout: timeout, PoolTimeout: timeout})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// tally is what clients saw.
type tally struct {
	mu       sync.Mutex
	status   map[int]int
	degraded int
	slowest  time.Duration
}

func (c *tally) add(res *http.Response, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.status == nil {
		c.status = make(map[int]int)
	}
	c.status[res.StatusCode]++
	if res.Header.Get("X-RateLimit-Degraded") == "true" {
		c.degraded++
	}
	c.slowest = max(c.slowest, took)
}

// load asks each edge from two clients until done says so.
func load(edges []*rig, done func(c *tally) bool) *tally {
	c := &tally{}
	var clients sync.WaitGroup
	for _, r := range edges {
		for range 2 {
			clients.Go(func() {
				for {
					began := time.Now()
					c.add(r.get("/api"), time.Since(began))
					c.mu.Lock()
					over := done(c)
					c.mu.Unlock()
					if over {
						return
					}
				}
			})
		}
	}
	clients.Wait()
	return c
}

// total is how many requests were answered so.
func (c *tally) total(status int) int { return c.status[status] }

// asked runs a load of about n requests.
func asked(n int) func(*tally) bool {
	return func(c *tally) bool {
		sum := 0
		for _, k := range c.status {
			sum += k
		}
		return sum >= n
	}
}

// check makes sure that everybody was answered with a decision.
func (c *tally) check(t *testing.T, phase string) {
	t.Helper()
	for status, n := range c.status {
		if status != 200 && status != 202 && status != 429 {
			t.Errorf("%s: %d answers with %d", phase, n, status)
		}
	}
}

// A limit is shared through Redis by all edges, to the token.
func TestEdgesShareALimit(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	server := redistest.Start(t)
	publish(t, b, policyFor(t, backend(t), 40))
	var edges []*rig
	for range 3 {
		// A busy machine must not look like a dead Redis here.
		r := start(t, edge.Deps{Bus: s.Bus(t), Store: onRedis(t, server, 10*time.Second)})
		r.awaitVersion(1)
		edges = append(edges, r)
	}
	c := load(edges, asked(100))
	c.check(t, "shared")
	if c.total(200) != 40 || c.total(202) != 8 || c.degraded != 0 {
		t.Errorf("%v, %d degraded; want 40 green and 8 yellow", c.status, c.degraded)
	}
}

// A Redis that stalls costs no request its answer. The breaker opens on debits without an
// answer; what may have been debited is counted once, as unknown, and nothing twice.
func TestRedisPaused(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	server := redistest.Start(t)
	st := onRedis(t, server, 0)
	const capacity = 100_000
	p := policyFor(t, backend(t), capacity)
	p.LeaseSize = new(int64(0)) // a lease without an answer is lost, which is another matter
	publish(t, b, p)
	r := start(t, edge.Deps{Bus: b, Store: st, Ping: st.Ping})
	r.awaitVersion(1)
	load([]*rig{r}, asked(50)).check(t, "before")

	server.Stop(t)
	stalled := load([]*rig{r}, func(c *tally) bool { return c.degraded >= 100 })
	stalled.check(t, "stalled")
	if d, err := r.ready(); err != nil || !d.Degraded || d.Store != "open" || r.metric("aegis_edge_degraded") != 1 {
		t.Errorf("stalled: %+v, %v", d, err)
	}
	t.Logf("slowest answer while Redis was stalled: %v", stalled.slowest)

	server.Cont(t)
	resumed := time.Now()
	bustest.Await(t, "recovery", func() bool { return r.get("/api").Header.Get("X-RateLimit-Degraded") == "" })
	t.Logf("deciding with Redis again after %v", time.Since(resumed))
	load([]*rig{r}, asked(50)).check(t, "after")
	r.stop()

	var took [3]int64
	for _, batch := range responses(t, b) {
		for _, e := range batch.Events {
			for _, c := range e.Charges {
				switch c.How {
				case events.HowRedis:
					took[0] += c.Amount
				case events.HowUnknown:
					took[1] += c.Amount
				case events.HowLocal:
					took[2] += c.Amount
				}
			}
		}
	}
	t.Logf("charged: %d in Redis, %d unknown, %d locally", took[0]/bucket.One, took[1]/bucket.One, took[2]/bucket.One)
	if took[1] == 0 || took[2] == 0 {
		t.Error("the stall left no trace in the events")
	}
	if left := balance(t, server); left > capacity*bucket.One-took[0] || left < capacity*bucket.One-took[0]-took[1] {
		t.Errorf("Redis holds %d of %d after %d charged and %d unknown: something was debited twice, or not", left, capacity*bucket.One, took[0], took[1])
	}
}

// balance is what the only token bucket in Redis holds, in micro-tokens; its refill is below the tolerance of a token.
func balance(t *testing.T, server *redistest.Server) int64 {
	t.Helper()
	keys, err := server.Client.Keys(t.Context(), "ratelimit:tb:*").Result()
	if err != nil || len(keys) != 1 {
		t.Fatalf("keys %v, %v", keys, err)
	}
	text, err := server.Client.HGet(t.Context(), keys[0], "tokens").Result()
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := strconv.ParseFloat(text, 64)
	if err != nil {
		t.Fatal(err)
	}
	// A refill of 0.001/s adds less than a tenth of a token to a test of a minute.
	return int64(tokens) * bucket.One
}

// Without Redis the fleet's sum stays the limit, nobody gets a 5xx, and the edges return to
// the shared limit by themselves.
func TestRedisKilled(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	server := redistest.Start(t)
	const capacity = 60
	publish(t, b, policyFor(t, backend(t), capacity))
	var edges []*rig
	for _, id := range []string{"a", "b", "c"} {
		st := onRedis(t, server, 0)
		edges = append(edges, start(t, edge.Deps{Bus: s.Bus(t), Store: st, Ping: st.Ping}, func(c *edge.Config) { c.ID = id }))
	}
	for _, r := range edges {
		r.awaitVersion(1)
		bustest.Await(t, "three edges", func() bool { d, _ := r.ready(); return d.LiveEdges == 3 })
	}
	server.Kill(t)
	c := load(edges, asked(300))
	c.check(t, "killed")
	for _, r := range edges {
		bustest.Await(t, "breaker", func() bool { d, _ := r.ready(); return d.Degraded })
	}
	if admitted := c.total(200); admitted != capacity || c.total(429) == 0 {
		t.Errorf("%v: the fleet admitted %d of %d", c.status, admitted, capacity)
	}

	server.Restart(t)
	for _, r := range edges {
		bustest.Await(t, "recovery", func() bool {
			res := r.get("/api")
			d, _ := r.ready()
			return res.Header.Get("X-RateLimit-Degraded") == "" && d.Store == "closed"
		})
	}
}

// Without Redis at the start an edge serves all the same.
func TestStartWithoutRedis(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	st, err := redisstore.New(redisstore.Options{Addrs: []string{redistest.FreeAddr(t)}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	publish(t, b, policyFor(t, backend(t), 5))
	r := start(t, edge.Deps{Bus: b, Store: st, Ping: st.Ping})
	r.awaitVersion(1)
	if res := r.get("/api"); res.StatusCode != 200 || res.Header.Get("X-RateLimit-Degraded") != "true" {
		t.Errorf("%s, %v", res.Status, res.Header)
	}
}

// FLUSHALL, nine times under load, without leases: Redis goes on from what the edge has seen. Over the limit
// goes at most what was under way at each loss. A client in debt stays in debt.
func TestFlushAllUnderLoad(t *testing.T) {
	t.Parallel()
	const capacity, flushes = 500, 9
	s := bustest.Start(t)
	b := s.Provisioned(t)
	server := redistest.Start(t)
	p := policyFor(t, backend(t), capacity)
	p.LeaseSize = new(int64(0))
	api := p.Routes["api"]
	api.Degrade = policy.DegradeOff
	p.Routes["api"] = api
	publish(t, b, p)
	shared := onRedis(t, server, 10*time.Second)
	r := start(t, edge.Deps{Bus: b, Store: shared})
	r.awaitVersion(1)

	c := &tally{}
	for i := range flushes {
		until := capacity / (flushes + 1) * (i + 1)
		each := load([]*rig{r, r}, asked(until-c.total(200)))
		for status, n := range each.status {
			if c.status == nil {
				c.status = map[int]int{}
			}
			c.status[status] += n
		}
		if err := server.Client.FlushAll(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
	}
	flushing := make(chan struct{})
	go func() { // and once more in the middle
		defer close(flushing)
		bustest.Await(t, "requests", func() bool { return r.metric("aegis_edge_healed_total") >= flushes })
		if err := server.Client.FlushAll(t.Context()).Err(); err != nil {
			t.Error(err)
		}
	}()
	rest := load([]*rig{r, r}, asked(2*capacity))
	<-flushing
	admitted := c.total(200) + rest.total(200)
	if over := admitted - capacity; over < 0 || over > 5*(flushes+1) {
		t.Errorf("admitted %d of %d, with %d losses", admitted, capacity, flushes+1)
	}
	t.Logf("admitted %d of %d over %d losses, healed %v times", admitted, capacity, flushes+1, r.metric("aegis_edge_healed_total"))
	if healed := r.metric("aegis_edge_healed_total"); healed < flushes {
		t.Errorf("healed %v times, want once a loss at the least", healed)
	}
}

// A failover to a stale replica: Redis holds what the bucket was 100 requests ago, of the same generation. It goes
// on from what the edge has seen since.
func TestStaleFailoverUnderLoad(t *testing.T) {
	t.Parallel()
	const capacity = 300
	s := bustest.Start(t)
	b := s.Provisioned(t)
	server := redistest.Start(t)
	p := policyFor(t, backend(t), capacity)
	p.LeaseSize = new(int64(0))
	api := p.Routes["api"]
	api.Degrade = policy.DegradeOff
	p.Routes["api"] = api
	publish(t, b, p)
	r := start(t, edge.Deps{Bus: b, Store: onRedis(t, server, 10*time.Second)})
	r.awaitVersion(1)

	admitted := load([]*rig{r, r}, asked(100)).total(200)
	keys, err := server.Client.Keys(t.Context(), "ratelimit:tb:*").Result()
	if err != nil || len(keys) != 1 {
		t.Fatalf("keys %q, %v", keys, err)
	}
	replica, err := server.Client.Dump(t.Context(), keys[0]).Result()
	if err != nil {
		t.Fatal(err)
	}
	admitted += load([]*rig{r, r}, asked(100)).total(200)
	if err := server.Client.RestoreReplace(t.Context(), keys[0], time.Hour, replica).Err(); err != nil {
		t.Fatal(err)
	}
	admitted += load([]*rig{r, r}, asked(capacity)).total(200)
	if over := admitted - capacity; over < 0 || over > 5 {
		t.Errorf("admitted %d of %d", admitted, capacity)
	}
	if healed := r.metric("aegis_edge_healed_total"); healed == 0 {
		t.Error("nothing was healed")
	}
}

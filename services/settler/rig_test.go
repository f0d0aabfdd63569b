package settler_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redisstore"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/settler"
)

const one = bucket.One

// The buckets of these tests do not refill: the rate is the least there is, a
// micro-token a second, and costs are multiples of step, so that what refills while a
// test runs is told from what was settled. The day counts exactly.
const (
	capacity = 1000 * one
	step     = 1000
	route    = "r"
)

var specs = []bucket.Spec{
	{Kind: bucket.TokenBucket, Capacity: capacity, Rate: 1, SlowestRate: 1, MaxDebt: 10 * capacity},
	{Kind: bucket.DailyQuota, Capacity: capacity, MaxDebt: 10 * capacity},
}

// today is the day that all charges of a test run are made on.
var today = time.Now().UnixMicro() / (24 * 3600 * one)

// model is what every client must have been charged, in micro-tokens.
type model map[string]int64

// publisher makes batches as an edge does, and keeps the model.
type publisher struct {
	t      testing.TB
	bus    *bus.Bus
	boot   string
	n      uint64
	rng    *rand.Rand
	want   model
	last   []byte // the last batch
	copies int    // published again
}

func newPublisher(t testing.TB, b *bus.Bus, boot string, want model) *publisher {
	return &publisher{t: t, bus: b, boot: boot, rng: rand.New(rand.NewPCG(1, uint64(len(boot)))), want: want}
}

func client(i int) string { return fmt.Sprintf("user:%d", i) }

// event is a request of a client that cost what the upstream says, charged to its route and its day.
func event(id, client, cost string) events.Response {
	return events.Response{
		ID: id, Client: client, Route: route, Upstream: "u", Time: time.Now().UnixMicro(), Config: 1,
		Charges: []events.Charge{
			{Scope: route, Spec: 0, How: events.HowRedis},
			{Scope: bucket.ScopeDay, Spec: 1, Window: today, How: events.HowRedis},
		},
		ComputeCost: cost, MaxCost: capacity, Status: 200, Latency: 1000, Duration: 1000, Outcome: events.OutcomeOK,
	}
}

// batch is the next one, of random costs for the given clients.
func (p *publisher) batch(clients ...int) []byte {
	var list []events.Response
	for _, c := range clients {
		micro := (1 + p.rng.Int64N(200)) * step
		p.want[client(c)] += micro
		list = append(list, event(fmt.Sprint(p.n, c), client(c), fmt.Sprintf("%d.%06d", micro/one, micro%one)))
	}
	return p.encode(list...)
}

func (p *publisher) encode(list ...events.Response) []byte {
	p.t.Helper()
	p.n++
	data, err := events.Encode(events.ResponseBatch{Boot: p.boot, Edge: "e", N: p.n, Specs: specs, Events: list})
	if err != nil {
		p.t.Fatal(err)
	}
	p.last = data
	return data
}

// id is the message id of the last batch.
func (p *publisher) id() string { return fmt.Sprintf("%s-%d", p.boot, p.n) }

// publish stores data under an id, and tries again while NATS is away, as an edge does.
func (p *publisher) publish(data []byte, id string) uint64 {
	p.t.Helper()
	for {
		ctx, cancel := context.WithTimeout(p.t.Context(), time.Second)
		seq, err := p.bus.Publish(ctx, events.SubjectResponse(p.boot), data, bus.WithMsgID(id))
		cancel()
		if err == nil {
			return seq
		}
		if p.t.Context().Err() != nil {
			p.t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// send publishes the next batch.
func (p *publisher) send(clients ...int) {
	p.t.Helper()
	data := p.batch(clients...)
	p.publish(data, p.id())
}

// again publishes the last batch once more, with an id that the stream no longer knows:
// as an edge that was cut off for longer than the stream remembers ids.
func (p *publisher) again() {
	p.t.Helper()
	p.copies++
	p.publish(p.last, fmt.Sprintf("%s-again-%d", p.id(), p.copies))
}

// check compares every bucket with the model, to the micro-token.
func (m model) check(t testing.TB, s store.Store) {
	t.Helper()
	over, under := int64(0), int64(0)
	for name, want := range m {
		d, err := s.Check(context.Background(), store.Check{Client: name, Limits: []store.Limit{
			{Scope: route, Spec: specs[0]}, {Scope: bucket.ScopeDay, Spec: specs[1]}}})
		if err != nil {
			t.Fatal(err)
		}
		token, day := capacity-d.Limits[0].Remaining, capacity-d.Limits[1].Remaining
		for _, got := range []int64{(token + step - 1) / step * step, day} { // what refilled is less than a step
			over += max(0, got-want)
			under += max(0, want-got)
			if got != want {
				t.Errorf("%s: %d micro-tokens taken, want %d", name, got, want)
			}
		}
	}
	t.Logf("%d clients: %d micro-tokens overcharged, %d undercharged", len(m), over, under)
}

// fast is a configuration for tests: everything that is periodic happens often.
func fast() settler.Config {
	cfg := settler.DefaultConfig()
	cfg.IdleEvery, cfg.PurgeEvery = 20*time.Millisecond, 50*time.Millisecond
	return cfg
}

// instance is a running settler.
type instance struct {
	*settler.Service
	registry *prometheus.Registry
	cancel   context.CancelFunc
	done     chan struct{}
	log      *logBuffer
}

// start runs a settler until the test ends or stop is called.
func start(t testing.TB, b *bus.Bus, s store.Store, cfg settler.Config) *instance {
	t.Helper()
	return startWith(t, b, s, cfg, func(*settler.Service) {})
}

// startWith is start, with a change to the settler before it runs.
func startWith(t testing.TB, b *bus.Bus, s store.Store, cfg settler.Config, change func(*settler.Service)) *instance {
	t.Helper()
	i := &instance{registry: prometheus.NewRegistry(), done: make(chan struct{}), log: &logBuffer{}}
	svc, err := settler.New(cfg, settler.Deps{Bus: b, Store: s, Log: zerolog.New(i.log), Registry: i.registry})
	if err != nil {
		t.Fatal(err)
	}
	change(svc)
	i.Service = svc
	ctx, cancel := context.WithCancel(context.Background())
	i.cancel = cancel
	go func() {
		defer close(i.done)
		if err := svc.Run(ctx); err != nil {
			t.Errorf("settler: %v", err)
		}
	}()
	t.Cleanup(func() {
		i.stop()
		if t.Failed() {
			t.Logf("log of the settler:\n%s", i.log)
		}
	})
	return i
}

func (i *instance) stop() {
	i.cancel()
	<-i.done
}

// flush waits until all that is published is settled.
func (i *instance) flush(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if err := i.Flush(ctx); err != nil {
		detail, notReady := i.Ready(ctx)
		t.Fatalf("%v; %+v (%v)", err, detail, notReady)
	}
}

// metric is the sum of a metric over its labels, or of the ones with the label value.
func (i *instance) metric(t testing.TB, name string, value ...string) float64 {
	t.Helper()
	families, err := i.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != "aegis_settler_"+name {
			continue
		}
		for _, m := range f.GetMetric() {
			if len(value) > 0 && m.GetLabel()[0].GetValue() != value[0] {
				continue
			}
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return sum
}

// logBuffer keeps a log for reading.
type logBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// count is how many lines contain s.
func (l *logBuffer) count(s string) int {
	n := 0
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, s) {
			n++
		}
	}
	return n
}

// redisStore is a store on a Redis, with the settler's patience.
func redisStore(t testing.TB, r *redistest.Server) *redisstore.Store {
	t.Helper()
	s, err := redisstore.New(redisstore.Options{Addrs: []string{r.Addr}, PoolSize: 32, Timeout: 300 * time.Millisecond, PoolTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

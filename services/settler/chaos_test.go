package settler_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/settler"
)

// mortal is the store of a settler that dies: before or after a settlement, and from then on
// nothing it asks for happens.
type mortal struct {
	store.Store
	rate float64 // of settlements that kill
	calm *atomic.Bool
	die  func()

	dead          atomic.Bool
	before, after *atomic.Int64
}

var errDead = errors.New("the settler is dead")

func (m *mortal) Settle(ctx context.Context, st store.Settlement) (store.Settled, error) {
	draw := 1.0
	if len(st.Items) > 0 && !m.calm.Load() {
		draw = rand.Float64() / m.rate
	}
	if draw < 0.5 && m.dead.CompareAndSwap(false, true) {
		m.before.Add(1)
		m.die()
	}
	if m.dead.Load() {
		return store.Settled{}, errDead
	}
	done, err := m.Store.Settle(ctx, st)
	if draw >= 0.5 && draw < 1 && done.Status == store.Applied && m.dead.CompareAndSwap(false, true) {
		m.after.Add(1)
		m.die()
	}
	if m.dead.Load() {
		return store.Settled{}, errDead
	}
	return done, err
}

func (m *mortal) Meta(ctx context.Context, shard int) (store.Meta, error) {
	if m.dead.Load() {
		return store.Meta{}, errDead
	}
	return m.Store.Meta(ctx, shard)
}

func (m *mortal) Begin(ctx context.Context, shard int, stream string, cursor uint64) (store.Meta, error) {
	if m.dead.Load() {
		return store.Meta{}, errDead
	}
	return m.Store.Begin(ctx, shard, stream, cursor)
}

func (m *mortal) Rebase(ctx context.Context, shard int, stream string, from, cursor uint64) (store.Meta, error) {
	if m.dead.Load() {
		return store.Meta{}, errDead
	}
	return m.Store.Rebase(ctx, shard, stream, from, cursor)
}

// crew are settlers that die at random and are replaced at once, until calm.
type crew struct {
	calm                 atomic.Bool
	before, after, lives atomic.Int64

	mu       sync.Mutex
	counters map[string]float64 // of all of them
}

// run keeps n settlers going until ctx ends.
func (c *crew) run(ctx context.Context, t *testing.T, n int, rate float64, b *bus.Bus, s store.Store) {
	c.counters = map[string]float64{}
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			for ctx.Err() == nil {
				c.live(ctx, t, rate, b, s)
			}
		})
	}
	wg.Wait()
}

func (c *crew) live(ctx context.Context, t *testing.T, rate float64, b *bus.Bus, s store.Store) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	registry := prometheus.NewRegistry()
	m := &mortal{Store: s, rate: rate, calm: &c.calm, die: cancel, before: &c.before, after: &c.after}
	svc, err := settler.New(fast(), settler.Deps{Bus: b, Store: m, Log: zerolog.Nop(), Registry: registry})
	if err != nil {
		t.Error(err)
		return
	}
	if err := svc.Run(ctx); err != nil {
		t.Error(err)
	}
	c.lives.Add(1)
	families, err := registry.Gather()
	if err != nil {
		t.Error(err)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range families {
		for _, metric := range f.GetMetric() {
			name := f.GetName()
			if l := metric.GetLabel(); len(l) > 0 {
				name += " " + l[0].GetValue()
			}
			c.counters[name] += metric.GetCounter().GetValue()
		}
	}
}

// snapshot is what a Redis holds, taken in one step: keys that came between their listing and
// their dump would be missing beside a cursor that has passed them.
func snapshot(t *testing.T, r *redistest.Server) map[string]string {
	t.Helper()
	list, err := r.Client.Eval(t.Context(), `
		local out = {}
		for _, key in ipairs(redis.call('KEYS', '*')) do
			out[#out + 1] = key
			out[#out + 1] = redis.call('DUMP', key)
		end
		return out`, nil).StringSlice()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for pair := range slices.Chunk(list, 2) {
		out[pair[0]] = pair[1]
	}
	return out
}

// restore takes a Redis back to a snapshot, in one step: what a failover to a stale replica does.
func restore(t *testing.T, r *redistest.Server, from map[string]string) {
	t.Helper()
	ctx := t.Context()
	tx := r.Client.TxPipeline()
	tx.FlushAll(ctx)
	for k, v := range from {
		tx.Restore(ctx, k, 0, v)
	}
	if _, err := tx.Exec(ctx); err != nil {
		t.Fatal(err)
	}
}

// Three settlers of which every fifth message kills one, batches stored twice, a Redis that
// stalls, that goes back in time and that loses everything: what was acknowledged is settled once.
func TestChaos(t *testing.T) {
	t.Parallel()
	const clients, perMessage = 60, 16
	n := bustest.Start(t)
	b := n.Provisioned(t)
	r := redistest.Start(t)
	s := redisStore(t, r)

	first := start(t, b, s, fast()) // begins every shard
	settled(t, first)
	first.stop()

	var c crew
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.run(ctx, t, 3, 0.2/perMessage, b, s)
	}()
	want := model{}
	p := newPublisher(t, b, "boot", want)
	rng := rand.New(rand.NewPCG(7, 7))
	var last uint64
	send := func() {
		list := rng.Perm(clients)[:perMessage]
		data := p.batch(list...)
		last = p.publish(data, p.id())
		switch rng.IntN(20) {
		case 0:
			p.publish(data, p.id()) // the acknowledgement was lost
		case 1:
			p.again()
		}
	}
	done := func() bool { return lowest(t, s) >= last }

	const messages = 260
	var older map[string]string
	for k := range messages {
		send()
		switch k {
		case 40, 150:
			older = snapshot(t, r)
		case 80, 190:
			awaitLong(t, "settlement beyond the snapshot", func() bool { return highest(s) > last-10 })
			restore(t, r, older)
		case 110, 220:
			r.Stop(t)
			time.Sleep(time.Second) // longer than any call is waited for
			r.Cont(t)
		}
	}
	c.calm.Store(true)
	awaitLong(t, "settlement of everything", done)
	want.check(t, s)

	if err := r.Client.FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	awaitLong(t, "a new beginning of every shard", func() bool { return lowest(t, s) >= last })
	p.want = model{}
	c.calm.Store(false)
	for range 50 {
		send()
	}
	c.calm.Store(true)
	awaitLong(t, "settlement after the loss", done)
	p.want.check(t, s)
	cancel()
	<-ended

	applied := c.counters["aegis_settler_settlements_total applied"]
	t.Logf("%d lives, %d crashes before and %d after a settlement; %v", c.lives.Load(), c.before.Load(), c.after.Load(), c.counters)
	if applied < 5000 {
		t.Errorf("%v settlements applied: too few to show anything", applied)
	}
	for what, got := range map[string]float64{
		"crashes before a settlement": float64(c.before.Load()),
		"crashes after a settlement":  float64(c.after.Load()),
		"duplicate batches":           c.counters["aegis_settler_settlements_total duplicate"],
		"messages settled by another": c.counters["aegis_settler_settlements_total behind"],
		"rewinds":                     c.counters["aegis_settler_rewinds_total"],
		"losses":                      c.counters["aegis_settler_losses_total"],
		"calls that did not answer":   c.counters["aegis_settler_store_failures_total"],
	} {
		if got == 0 {
			t.Errorf("no %s: the test shows nothing about them", what)
		}
	}
}

// lowest is the lowest cursor that the store holds, 0 while it is away or has none.
func lowest(t *testing.T, s store.Store) uint64 {
	low := ^uint64(0)
	for shard := range store.Shards {
		m, err := s.Meta(t.Context(), shard)
		if err != nil || m.Epoch == "" {
			return 0
		}
		low = min(low, m.Cursor)
	}
	return low
}

// highest is the highest cursor that the store holds.
func highest(s store.Store) uint64 {
	high := uint64(0)
	for shard := range store.Shards {
		cursor, _ := cursorOf(s, shard)
		high = max(high, cursor)
	}
	return high
}

// awaitLong is bustest.Await for what takes a loaded machine longer.
func awaitLong(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: did not happen in time", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A settler process that is killed with -9 while it settles leaves nothing half done.
func TestKillNine(t *testing.T) {
	t.Parallel()
	bin := filepath.Join(t.TempDir(), "settler")
	if out, err := exec.Command("go", "build", "-o", bin, "./cmd/settler").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	n := bustest.Start(t, bustest.Listen())
	b := n.Provisioned(t)
	r := redistest.Start(t)
	s := redisStore(t, r)
	launch := func() *exec.Cmd {
		c := exec.Command(bin)
		c.Env = append(os.Environ(), "AEGIS_NATS_URL="+n.URL(), "AEGIS_REDIS_ADDR="+r.Addr, "AEGIS_ADMIN_ADDR=127.0.0.1:0",
			"AEGIS_SETTLER_IDLE_EVERY=20ms", "AEGIS_LOG_LEVEL=error")
		c.Stdout, c.Stderr = os.Stderr, os.Stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		return c
	}
	kill := func(c *exec.Cmd) {
		c.Process.Kill()
		c.Wait() // its error is that it was killed
	}
	process := launch()
	for shard := range store.Shards {
		awaitLong(t, "the first beginning", func() bool { _, begun := cursorOf(s, shard); return begun })
	}
	want := model{}
	p := newPublisher(t, b, "boot", want)
	shard := store.ShardOf(client(0))
	var last uint64
	amid := 0
	for range 15 {
		target := last + uint64(rand.IntN(55))
		for range 60 {
			data := p.batch(0, 1, 2, 3, 4, 5, 6, 7)
			last = p.publish(data, p.id())
		}
		awaitLong(t, "progress", func() bool { c, _ := cursorOf(s, shard); return c > target })
		kill(process)
		if lowest(t, s) < last {
			amid++
		}
		process = launch()
	}
	t.Cleanup(func() { kill(process) })
	awaitLong(t, "settlement of everything", func() bool { return lowest(t, s) >= last })
	want.check(t, s)
	if amid == 0 {
		t.Error("no kill came amid settlement: the test shows nothing")
	}
	t.Logf("%d of 15 kills came amid settlement", amid)
	if got := deadLetters(t, b); got != 0 {
		t.Errorf("%d dead letters", got)
	}
}

func cursorOf(s store.Store, shard int) (cursor uint64, begun bool) {
	m, err := s.Meta(context.Background(), shard)
	return m.Cursor, err == nil && m.Epoch != ""
}

func deadLetters(t *testing.T, b *bus.Bus) uint64 {
	t.Helper()
	state, err := b.Stream(t.Context(), events.StreamDeadLetter)
	if err != nil {
		t.Fatal(err)
	}
	return state.Msgs
}

// State that is lost is noticed without a message, logged for every shard, and settlement goes on.
func TestFlushAllIsLoggedAndResumes(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	r := redistest.Start(t)
	s := redisStore(t, r)
	i := start(t, b, s, fast())
	settled(t, i)
	p := newPublisher(t, b, "boot", model{})
	for range 20 {
		p.send(1, 2, 3)
	}
	i.flush(t)
	if err := r.Client.FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "a new beginning of every shard", func() bool { return lowest(t, s) >= 20 })
	bustest.Await(t, "the log of what was lost", func() bool { return i.log.count(`"settled_to":20`) > 0 })
	if got := i.metric(t, "losses_total"); got != 2*store.Shards { // the first start, and now
		t.Errorf("%v losses counted, want %d", got, 2*store.Shards)
	}
	want := model{}
	p.want = want
	for range 20 {
		p.send(1, 2, 3)
	}
	i.flush(t)
	want.check(t, s)
}

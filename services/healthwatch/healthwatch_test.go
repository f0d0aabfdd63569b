package healthwatch_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/healthwatch"
)

// interval is short, so that tests see many steps.
const interval = 50 * time.Millisecond

// replica is a running healthwatch.
type replica struct {
	*healthwatch.Service
	registry *prometheus.Registry
	stop     func()
}

func start(t *testing.T, b *bus.Bus, name string) *replica {
	t.Helper()
	r := &replica{registry: prometheus.NewRegistry()}
	cfg := healthwatch.DefaultConfig(name)
	cfg.Interval = interval
	svc, err := healthwatch.New(cfg, healthwatch.Deps{Bus: b, Registry: r.registry,
		Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel)})
	if err != nil {
		t.Fatal(err)
	}
	r.Service = svc
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := svc.Run(ctx); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}()
	r.stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(r.stop)
	return r
}

func (r *replica) metric(t *testing.T, name string) float64 {
	t.Helper()
	families, err := r.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() == "aegis_healthwatch_"+name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// configure publishes a policy with the upstreams of these names.
func configure(t *testing.T, b *bus.Bus, version uint64, upstreams ...string) {
	t.Helper()
	doc := `{"upstreams":{`
	for i, u := range upstreams {
		if i > 0 {
			doc += ","
		}
		doc += fmt.Sprintf(`%q:{"url":"http://u"}`, u)
	}
	p, err := policy.Parse([]byte(doc + `}}`))
	if err != nil {
		t.Fatal(err)
	}
	document, err := policy.Encode(p)
	if err != nil {
		t.Fatal(err)
	}
	data, err := events.Encode(events.ConfigVersion{Version: version, By: "test", Via: "file", Time: time.Now(), Document: document})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, b, events.SubjectConfigUpdates, data)
}

func publish(t *testing.T, b *bus.Bus, subject string, data []byte) {
	t.Helper()
	if _, err := b.Publish(t.Context(), subject, data); err != nil {
		t.Fatal(err)
	}
}

// requests publishes a batch of n requests to an upstream.
func requests(t *testing.T, b *bus.Bus, upstream string, n int, latency time.Duration, status int) {
	t.Helper()
	batch := events.ResponseBatch{Boot: "boot", Edge: "e", N: 1}
	for i := range n {
		batch.Events = append(batch.Events, events.Response{
			ID: fmt.Sprint(i), Client: "c", Route: "r", Upstream: upstream,
			Time: time.Now().Add(-latency).UnixMicro(), Status: status,
			Latency: latency.Microseconds(), Duration: latency.Microseconds(), Outcome: events.OutcomeOK,
		})
	}
	data, err := events.Encode(batch)
	if err != nil {
		t.Fatal(err)
	}
	publish(t, b, events.SubjectResponse("boot"), data)
}

// watcher collects the ticks of an upstream.
type watcher struct {
	mu    sync.Mutex
	ticks []events.Health
	times []time.Time
}

func watch(t *testing.T, b *bus.Bus, upstream string) *watcher {
	t.Helper()
	w := &watcher{}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.Follow(ctx, events.StreamHealth, bus.All(), func(m bus.Message) error {
			h, err := events.Decode[events.Health](m.Data)
			if err != nil {
				return nil // planted by a test
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			w.ticks = append(w.ticks, h)
			w.times = append(w.times, m.Time)
			return nil
		}, bus.Subjects(events.SubjectHealth(upstream)))
	}()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

func (w *watcher) last() events.Health {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.ticks) == 0 {
		return events.Health{}
	}
	return w.ticks[len(w.ticks)-1]
}

// ids names the replicas that published ticks.
func (w *watcher) ids() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	by := map[string]int{}
	for _, h := range w.ticks {
		by[h.By]++
	}
	return by
}

// check: the ticks count without gap or repeat, an interval apart at least, and M takes
// one step at a time.
func (w *watcher) check(t *testing.T, interval time.Duration) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, h := range w.ticks {
		if h.Multiplier < bucket.FloorMultiplier || h.Multiplier > bucket.One {
			t.Errorf("tick %d: M %d out of bounds", h.Tick, h.Multiplier)
		}
		if i == 0 {
			continue
		}
		before := w.ticks[i-1]
		if h.Tick != before.Tick+1 {
			t.Errorf("tick %d by %s follows %d by %s", h.Tick, h.By, before.Tick, before.By)
		}
		if apart := w.times[i].Sub(w.times[i-1]); apart < interval*9/10 {
			t.Errorf("tick %d by %s came %v after %d by %s", h.Tick, h.By, apart, before.Tick, before.By)
		}
		least, most := max(bucket.FloorMultiplier, before.Multiplier/2), before.Multiplier+bucket.One/20
		if h.Multiplier < least || h.Multiplier > most {
			t.Errorf("tick %d: M went from %d to %d in one step", h.Tick, before.Multiplier, h.Multiplier)
		}
	}
}

func TestFallsAndRecoversWithoutTraffic(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	configure(t, b, 1, "slow", "failing", "fine")
	slow, failing, fine := watch(t, b, "slow"), watch(t, b, "failing"), watch(t, b, "fine")
	r := start(t, b, "a")
	requests(t, b, "slow", 30, 900*time.Millisecond, 200)
	requests(t, b, "failing", 30, 10*time.Millisecond, 503)
	requests(t, b, "fine", 30, 10*time.Millisecond, 200)
	requests(t, b, "unknown", 30, 10*time.Millisecond, 500)
	bustest.Await(t, "fall of the slow upstream to the floor", func() bool { return slow.last().Multiplier == bucket.FloorMultiplier })
	bustest.Await(t, "fall of the failing upstream to the floor", func() bool { return failing.last().Multiplier == bucket.FloorMultiplier })
	if h := slow.last(); h.P95 != 900_000 || h.ErrorRate != 0 || h.Samples != 30 {
		t.Errorf("slow: %+v", h)
	}
	if h := failing.last(); h.P95 != 10_000 || h.ErrorRate != bucket.One || h.Samples != 30 {
		t.Errorf("failing: %+v", h)
	}
	if h := fine.last(); h.Multiplier != bucket.One {
		t.Errorf("fine: %+v", h)
	}
	requests(t, b, "failing", 30, 10*time.Millisecond, 200)
	bustest.Await(t, "recovery of the failing upstream", func() bool { return failing.last().Multiplier == bucket.One })
	for _, w := range []*watcher{slow, failing, fine} {
		w.check(t, interval)
	}
	if _, err := r.Ready(t.Context()); err != nil {
		t.Errorf("not ready: %v", err)
	}
	if m, err := b.Last(t.Context(), events.StreamHealth, events.SubjectHealth("unknown")); err == nil {
		t.Errorf("a tick of an upstream that no policy names: %s", m.Data)
	}
}

// Samples that are too old no longer hold M down, though nobody asks the upstream any more.
func TestRecoversWhenSamplesAge(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	p, err := policy.Parse([]byte(`{"upstreams":{"u":{"url":"http://u","health":{"max_age_seconds":1}}}}`))
	if err != nil {
		t.Fatal(err)
	}
	document, err := policy.Encode(p)
	if err != nil {
		t.Fatal(err)
	}
	data, err := events.Encode(events.ConfigVersion{Version: 1, By: "test", Via: "file", Time: time.Now(), Document: document})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, b, events.SubjectConfigUpdates, data)
	w := watch(t, b, "u")
	start(t, b, "a")
	bustest.Await(t, "first tick", func() bool { return w.last().Tick > 0 })
	requests(t, b, "u", 30, 900*time.Millisecond, 200)
	bustest.Await(t, "fall", func() bool { return w.last().Multiplier <= bucket.One/2 })
	bustest.Await(t, "recovery", func() bool { return w.last().Multiplier == bucket.One })
	if h := w.last(); h.Samples != 0 {
		t.Errorf("recovered on %+v", h)
	}
	w.check(t, interval)
}

func TestTwoReplicasAgree(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	configure(t, b, 1, "u")
	w := watch(t, b, "u")
	replicas := []*replica{start(t, b, "a"), start(t, b, "b"), start(t, b, "c")}
	for i := range 8 {
		latency := 10 * time.Millisecond
		if i%2 == 0 {
			latency = 900 * time.Millisecond
		}
		tick := w.last().Tick
		requests(t, b, "u", 30, latency, 200)
		bustest.Await(t, "more ticks", func() bool { return w.last().Tick >= tick+6 })
	}
	w.check(t, interval)
	want := w.last().Tick
	for _, r := range replicas {
		bustest.Await(t, "the replicas to have seen the last tick", func() bool {
			d, err := r.Ready(t.Context())
			return err == nil && d.(healthwatch.Detail).Upstreams["u"].Tick >= want
		})
	}
	// One dies; the others go on, from where it was.
	replicas[0].stop()
	replicas[1].stop()
	tick := w.last().Tick
	bustest.Await(t, "ticks of the one that is left", func() bool { return w.last().Tick >= tick+5 })
	w.check(t, interval)
	conflicts := 0.0
	for _, r := range replicas {
		conflicts += r.metric(t, "conflicts_total")
	}
	t.Logf("%v published, %v conflicts", w.ids(), conflicts)
}

// A process that was stopped can neither take M back nor step it twice.
func TestTwoHealthwatchersOneStopped(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		interval, stop time.Duration
		rounds         int
	}{
		"for eight seconds":               {500 * time.Millisecond, 8 * time.Second, 1},
		"thrice, for ten short intervals": {200 * time.Millisecond, 2 * time.Second, 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			stoppedReplica(t, c.interval, c.stop, c.rounds)
		})
	}
}

func stoppedReplica(t *testing.T, interval, stop time.Duration, rounds int) {
	bin := filepath.Join(t.TempDir(), "healthwatch")
	if out, err := exec.Command("go", "build", "-o", bin, "./cmd/healthwatch").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	n := bustest.Start(t, bustest.Listen())
	b := n.Provisioned(t)
	configure(t, b, 1, "u")
	w := watch(t, b, "u")
	launch := func(name string) *os.Process {
		c := exec.Command(bin)
		c.Env = append(os.Environ(), "AEGIS_NATS_URL="+n.URL(), "AEGIS_ADMIN_ADDR=127.0.0.1:0",
			"AEGIS_HEALTHWATCH_NAME="+name, "AEGIS_HEALTHWATCH_INTERVAL="+interval.String(), "AEGIS_LOG_LEVEL=error")
		c.Stdout, c.Stderr = os.Stderr, os.Stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			c.Process.Kill()
			c.Wait() // its error is that it was killed
		})
		return c.Process
	}
	signal := func(p *os.Process, s syscall.Signal) {
		t.Helper()
		if err := p.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	a := launch("a")
	bustest.Await(t, "ticks by the first", func() bool { return w.ids()["a"] >= 2 })
	launch("b")
	for range rounds {
		tick := w.last().Tick
		bustest.Await(t, "ticks", func() bool { return w.last().Tick >= tick+3 })
		requests(t, b, "u", 30, 900*time.Millisecond, 200)
		bustest.Await(t, "fall", func() bool { return w.last().Multiplier == bucket.FloorMultiplier })
		signal(a, syscall.SIGSTOP)
		requests(t, b, "u", 30, 10*time.Millisecond, 200)
		from, stopped := w.last().Tick, time.Now()
		bustest.Await(t, "ticks without the one that is stopped", func() bool { return w.last().Tick >= from+6 && time.Since(stopped) >= stop })
		signal(a, syscall.SIGCONT)
		from = w.last().Tick
		bustest.Await(t, "ticks after it goes on", func() bool { return w.last().Tick >= from+6 })
		if m := w.last().Multiplier; m < 700_000 {
			t.Errorf("M is %d after twelve healthy intervals", m)
		}
	}
	w.check(t, interval)
	if by := w.ids(); by["a"] == 0 || by["b"] == 0 {
		t.Errorf("published by %v: want both", by)
	}
}

// What can't be read is counted and changes nothing.
func TestMalformed(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	configure(t, b, 1, "u")
	w := watch(t, b, "u")
	r := start(t, b, "a")
	requests(t, b, "u", 30, 400*time.Millisecond, 200) // neither slow nor fast: M stays at 1
	bustest.Await(t, "first ticks", func() bool { return w.last().Samples == 30 })
	for _, data := range []string{"", "garbage", `{"type":"aegis.response.v9"}`} {
		publish(t, b, events.SubjectResponse("boot"), []byte(data))
	}
	publish(t, b, events.SubjectConfigUpdates, []byte(`{"type":"aegis.config.v1","version":2,"document":{"upstreams":{"u":{"url":7}}}}`))
	configure(t, b, 99, "forged") // stands at 3
	bustest.Await(t, "five to be counted", func() bool { return r.metric(t, "malformed_total") == 5 })
	before := w.last()
	publish(t, b, events.SubjectHealth("u"), []byte("garbage"))
	bustest.Await(t, "the sixth", func() bool { return r.metric(t, "malformed_total") >= 6 })
	bustest.Await(t, "a tick after it", func() bool { return w.last().Tick > before.Tick })
	if m := w.last().Multiplier; m != bucket.One {
		t.Errorf("M is %d after a tick that can't be read, want 1 still", m)
	}
	w.check(t, 0)
}

// A replica that starts late, or again, goes on from the last tick; a new version brings and takes upstreams.
func TestRestartAndConfigChange(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	configure(t, b, 1, "u")
	w := watch(t, b, "u")
	r := start(t, b, "a")
	requests(t, b, "u", 30, 900*time.Millisecond, 200)
	bustest.Await(t, "fall", func() bool { return w.last().Multiplier == bucket.FloorMultiplier })
	r.stop()
	tick := w.last().Tick
	start(t, b, "b")
	bustest.Await(t, "ticks of the second", func() bool { return w.last().Tick >= tick+3 })
	if h := w.last(); h.Multiplier != bucket.FloorMultiplier || h.Samples != 30 {
		t.Errorf("after the restart: %+v, want the window read again and M on the floor", h)
	}
	v := watch(t, b, "v")
	configure(t, b, 2, "v")
	bustest.Await(t, "ticks of the new upstream", func() bool { return v.last().Tick >= 3 })
	tick = w.last().Tick
	from := v.last().Tick
	bustest.Await(t, "more of them", func() bool { return v.last().Tick >= from+3 })
	if got := w.last().Tick; got != tick {
		t.Errorf("the upstream that is gone went on from tick %d to %d", tick, got)
	}
	configure(t, b, 3, "u", "v")
	bustest.Await(t, "ticks of the upstream that is back", func() bool { return w.last().Tick >= tick+3 })
	w.check(t, interval)
	v.check(t, interval)
}

// Without NATS nothing is published, and nothing is lost of the protocol when it is back, nor
// when the stream of ticks was made anew.
func TestNATSRestartAndNewStream(t *testing.T) {
	t.Parallel()
	n := bustest.Start(t)
	b := n.Provisioned(t)
	configure(t, b, 1, "u")
	w := watch(t, b, "u")
	r := start(t, b, "a")
	start(t, b, "b")
	requests(t, b, "u", 30, 900*time.Millisecond, 200)
	bustest.Await(t, "fall", func() bool { return w.last().Multiplier == bucket.FloorMultiplier })
	n.Stop()
	bustest.Await(t, "notice of it", func() bool { _, err := r.Ready(t.Context()); return err != nil })
	n.Restart()
	tick := w.last().Tick
	bustest.Await(t, "ticks after the restart", func() bool { return w.last().Tick >= tick+5 })
	w.check(t, interval)
	n.DeleteStream(t, events.StreamHealth)
	if err := b.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
	again := watch(t, b, "u")
	bustest.Await(t, "ticks in the new stream", func() bool { return again.last().Tick >= tick+10 })
	again.check(t, interval)
}

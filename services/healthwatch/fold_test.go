package healthwatch

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

var testRules = policy.HealthRules{
	SlowP95: 800_000, FastP95: 300_000, ErrorRate: 150_000, ClearRate: 50_000, Floor: 200_000, Decrease: 500_000, Increase: 50_000,
	MinSamples: 10, Window: 30, MaxAge: 60_000_000,
}

// newTestFold is a fold of one upstream on a clock that the test moves.
func newTestFold() (f *fold, clock *time.Duration) {
	clock = new(time.Duration)
	f = newFold("a", time.Second, func() time.Duration { return *clock })
	f.configure(map[string]policy.UpstreamRules{"u": {Health: testRules}})
	return f, clock
}

// dueNow is the step that is due, if one is.
func dueNow(t *testing.T, f *fold) (intent, bool) {
	t.Helper()
	steps, _ := f.due()
	if len(steps) == 0 {
		return intent{}, false
	}
	return steps[0], true
}

func TestFoldStepsAnIntervalAfterTheLastTick(t *testing.T) {
	t.Parallel()
	f, clock := newTestFold()
	if _, ok := dueNow(t, f); ok {
		t.Fatal("a step before an interval has passed")
	}
	*clock = 2 * time.Second
	next, ok := dueNow(t, f)
	if !ok || next.after != 0 || next.health.Tick != 1 || next.health.Multiplier != bucket.One {
		t.Fatalf("first step: %+v, %v", next, ok)
	}
	if _, ok := dueNow(t, f); ok {
		t.Fatal("the same step twice")
	}
	// Another replica was first, and an interval counts from when that was seen.
	*clock = 3 * time.Second
	f.see("u", tick{7, events.Health{Upstream: "u", Tick: 9, Multiplier: 400_000}})
	f.conclude("u", 0, tick{6, events.Health{Upstream: "u", Tick: 8, Multiplier: 900_000}}) // known to be outdated
	*clock = 3*time.Second + 999*time.Millisecond
	if _, ok := dueNow(t, f); ok {
		t.Fatal("a step within an interval of another's")
	}
	*clock = 5 * time.Second
	next, ok = dueNow(t, f)
	if !ok || next.after != 7 || next.health.Tick != 10 || next.health.Multiplier != 450_000 {
		t.Fatalf("step after another's: %+v, %v", next, ok)
	}
}

// The number of ticks never falls, though a stream that was made anew begins with low ones.
func TestFoldNumberNeverFalls(t *testing.T) {
	t.Parallel()
	f, clock := newTestFold()
	f.see("u", tick{500, events.Health{Upstream: "u", Tick: 90, Multiplier: 400_000}})
	f.reset()
	f.see("u", tick{1, events.Health{Upstream: "u", Tick: 1, Multiplier: 600_000}})
	*clock = 2 * time.Second
	next, ok := dueNow(t, f)
	if !ok || next.after != 1 || next.health.Tick != 91 || next.health.Multiplier != 650_000 {
		t.Errorf("after a new stream: %+v, %v", next, ok)
	}
	// Nor does a message that can't be read change anything but the place.
	f.see("u", tick{seq: 2})
	*clock = 4 * time.Second
	next, ok = dueNow(t, f)
	if !ok || next.after != 2 || next.health.Tick != 91 || next.health.Multiplier != 650_000 {
		t.Errorf("after an unreadable tick: %+v, %v", next, ok)
	}
}

// Samples age by the clock of the log, not by this machine's.
func TestFoldAgesByTheLog(t *testing.T) {
	t.Parallel()
	f, clock := newTestFold()
	stored := time.UnixMicro(1_000_000_000_000_000) // years from this machine's time
	f.observe(stored)
	batch := events.ResponseBatch{Boot: "b", N: 1}
	for range 10 {
		batch.Events = append(batch.Events, events.Response{Upstream: "u", Time: stored.UnixMicro() + 3_600_000_000, // an hour ahead
			Status: 200, Latency: 900_000, Outcome: events.OutcomeOK})
	}
	f.add(batch, stored)
	*clock = 59 * time.Second
	if next, ok := dueNow(t, f); !ok || next.health.Samples != 10 || next.health.Multiplier != bucket.One/2 {
		t.Errorf("before they are old: %+v, %v", next, ok)
	}
	*clock = 61 * time.Second
	if next, ok := dueNow(t, f); !ok || next.health.Samples != 0 {
		t.Errorf("when they are: %+v, %v", next, ok)
	}
}

// Two replicas on clocks of their own, stopped for eight seconds in the middle of a step every now and then, whose
// log's clock jumps: the ticks count up by one, an interval apart at the least, and each M follows from the one before.
func TestTwoHealthwatchersOnFakeClocks(t *testing.T) {
	t.Parallel()
	const seeds = 50
	ticks, allStops := 0, 0
	for seed := range uint64(seeds) {
		rng := rand.New(rand.NewPCG(seed, 0))
		type replica struct {
			*fold
			clock   *time.Duration
			stopped time.Duration // until then
			held    []intent      // decided before it was stopped, not published yet
		}
		replicas := make([]*replica, 2)
		for i := range replicas {
			f, clock := newTestFold()
			*clock = time.Duration(rng.IntN(1_000_000)) * time.Second // no clock has another's origin
			f.configure(nil)                                          // and its first interval begins there
			f.configure(map[string]policy.UpstreamRules{"u": {Health: testRules}})
			replicas[i] = &replica{fold: f, clock: clock}
		}
		var stream []events.Health
		at := func() tick { return tick{uint64(len(stream)), stream[len(stream)-1]} }
		last, stops := time.Duration(-1), 0
		for now := time.Duration(0); now < 100*time.Second; now += 10 * time.Millisecond {
			for _, r := range replicas {
				*r.clock += 10 * time.Millisecond // it goes on while the process is stopped
				if now < r.stopped {
					continue
				}
				if len(stream) > 0 && rng.IntN(3) == 0 { // it hears of the last tick, sooner or later
					r.see("u", at())
				}
				if rng.IntN(100) == 0 { // the log's clock jumps by up to an hour
					r.observe(time.UnixMicro(1_700_000_000_000_000 + rng.Int64N(7_200_000_000)))
				}
				steps := r.held
				if r.held = nil; steps == nil {
					if steps, _ = r.due(); len(steps) > 0 && rng.IntN(8) == 0 {
						r.held, r.stopped = steps, now+8*time.Second
						stops++
						continue
					}
				}
				for _, next := range steps {
					if next.after != uint64(len(stream)) { // refused: it adopts what is there
						r.conclude("u", next.after, at())
						continue
					}
					m := int64(bucket.One)
					if len(stream) > 0 {
						m = at().health.Multiplier
					}
					if next.health.Tick != uint64(len(stream))+1 || next.health.Multiplier != step(m, stats{}, testRules) {
						t.Fatalf("seed %d: tick %d: %+v after M %d", seed, len(stream)+1, next.health, m)
					}
					if last >= 0 && now-last < time.Second-100*time.Millisecond { // what is heard late is stepped from early
						t.Fatalf("seed %d: two steps within %v", seed, now-last)
					}
					last = now
					stream = append(stream, next.health)
					r.conclude("u", next.after, at())
				}
			}
		}
		ticks, allStops = ticks+len(stream), allStops+stops
	}
	// Intervals have a part of chance in them, so a single run may tick a little less.
	if ticks < seeds*50 || allStops < seeds*3 {
		t.Errorf("%d ticks and %d stops in %d times 100 s", ticks, allStops, seeds)
	}
}

package healthwatch

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// fold is what a replica knows: a window and the last tick of every upstream. It
// publishes nothing and reads no clock but the one it is given.
type fold struct {
	by       string
	interval time.Duration
	mono     func() time.Duration

	mu        sync.Mutex
	clock     logClock
	upstreams map[string]*upstream
	// ticks are the last ones by upstream, also of upstreams that no policy names now.
	ticks map[string]tick
}

// upstream is one that the policy names.
type upstream struct {
	rules  policy.HealthRules
	window window
	// due is when this replica takes the next step, by the monotonic clock.
	due time.Duration
}

// tick is a published tick, and its sequence in AEGIS_HEALTH (0: the stream has none of the upstream).
type tick struct {
	seq    uint64
	health events.Health
}

func newFold(by string, interval time.Duration, mono func() time.Duration) *fold {
	return &fold{
		by:        by,
		interval:  interval,
		mono:      mono,
		clock:     logClock{mono: mono},
		upstreams: map[string]*upstream{},
		ticks:     map[string]tick{},
	}
}

// configure takes the upstreams of a policy: new ones start with an empty window, those
// that are gone are forgotten, the others go on by their new rules.
func (f *fold) configure(rules map[string]policy.UpstreamRules) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name := range f.upstreams {
		if _, ok := rules[name]; !ok {
			delete(f.upstreams, name)
		}
	}
	for name, r := range rules {
		u, ok := f.upstreams[name]
		if !ok {
			u = &upstream{due: f.mono() + f.interval}
			f.upstreams[name] = u
		}
		u.rules = r.Health
		u.window.resize(r.Health.Window)
	}
}

// add folds a batch of responses that was stored at the given time. Requests to
// upstreams that the policy does not name are no samples.
func (f *fold) add(b events.ResponseBatch, stored time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range b.Events {
		u, ok := f.upstreams[e.Upstream]
		if !ok {
			continue
		}
		if s, ok := sampleOf(e); ok {
			s.at = min(s.at, stored.UnixMicro()) // an edge's clock that is ahead keeps no sample young
			u.window.add(s)
		}
	}
}

// observe sets the clock by a message that came as it was stored.
func (f *fold) observe(stored time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clock.observe(stored)
}

// see takes note of a tick that was read from the stream.
func (f *fold) see(name string, t tick) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.seq > f.ticks[name].seq {
		f.adopt(name, t)
	}
}

// adopt makes t the tick to go on from, an interval from now. A tick that could not
// be read gives its place only. The number never falls, even where the stream was
// made anew and another replica began again.
func (f *fold) adopt(name string, t tick) {
	last := f.ticks[name].health
	if t.health.Tick == 0 {
		t.health = last
	}
	t.health.Tick = max(t.health.Tick, last.Tick)
	f.ticks[name] = t
	f.postpone(name)
}

// postpone makes an upstream due an interval from now, and a little more by chance, so that
// most of the time one replica has published before the others try.
func (f *fold) postpone(name string) {
	if u, ok := f.upstreams[name]; ok {
		u.due = f.mono() + f.interval + rand.N(f.interval/8)
	}
}

// conclude takes the outcome of a step from the tick of sequence from: now is the
// last tick of the stream, this replica's or another's. It is ignored if a later
// one was seen meanwhile.
func (f *fold) conclude(name string, from uint64, now tick) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ticks[name].seq == from || now.seq > f.ticks[name].seq {
		f.adopt(name, now)
	}
}

// reset forgets the sequences of all ticks, because the stream was made anew.
func (f *fold) reset() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, t := range f.ticks {
		t.seq = 0
		f.ticks[name] = t
	}
}

// intent is a step that a replica is about to publish: the tick that follows the
// one of sequence after.
type intent struct {
	name   string
	after  uint64
	health events.Health
}

// due gives the steps to take now, and how long until there may be the next. An
// upstream whose step is given is not due again for an interval, whatever becomes of it.
func (f *fold) due() (steps []intent, wait time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now, wait := f.mono(), f.interval
	for name, u := range f.upstreams {
		if left := u.due - now; left > 0 {
			wait = min(wait, left)
			continue
		}
		f.postpone(name)
		steps = append(steps, f.next(name, u))
	}
	return steps, wait
}

// next is the step of an upstream from its last tick.
func (f *fold) next(name string, u *upstream) intent {
	if now, ok := f.clock.now(); ok {
		u.window.age(now - u.rules.MaxAge)
	}
	last, st := f.ticks[name], u.window.stats()
	m := last.health.Multiplier
	if last.health.Tick == 0 {
		m = bucket.One
	}
	return intent{name, last.seq, events.Health{
		Upstream:   name,
		Tick:       last.health.Tick + 1,
		Multiplier: step(m, st, u.rules),
		P95:        st.p95,
		ErrorRate:  st.errorRate(),
		Samples:    st.samples,
		By:         f.by,
	}}
}

// maxAge is the oldest that a sample of any upstream may be.
func (f *fold) maxAge() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	age := int64(0)
	for _, u := range f.upstreams {
		age = max(age, u.rules.MaxAge)
	}
	return time.Duration(age) * time.Microsecond
}

// last gives the last tick of every upstream that the policy names.
func (f *fold) last() map[string]events.Health {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make(map[string]events.Health, len(f.upstreams))
	for name := range f.upstreams {
		out[name] = f.ticks[name].health
	}
	return out
}

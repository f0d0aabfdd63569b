package settler

import (
	"context"
	"sort"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// upkeep moves the cursors of idle shards, keeps the figures and purges, until ctx ends.
func (s *Service) upkeep(ctx context.Context) {
	idle := time.NewTicker(s.cfg.IdleEvery)
	defer idle.Stop()
	purge := time.NewTicker(s.cfg.PurgeEvery)
	defer purge.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-idle.C:
			s.advance(ctx)
			s.observe(ctx, time.Now())
		case <-purge.C:
			s.purge(ctx, time.Now())
		}
	}
}

// advance moves the idle shards of the main reader.
func (s *Service) advance(ctx context.Context) {
	s.turn.Lock()
	defer s.turn.Unlock()
	reader{s, s.incarnation.Load().(string), upToDate}.advance(ctx, s.position.Load())
}

// advance tells every shard of the reader that it has settled all up to position. For
// an idle shard that moves the cursor; for all it finds lost and rewound state
// before the next message does. Counters of boots that are long gone are dropped.
// The caller has the turn.
func (s reader) advance(ctx context.Context, position uint64) {
	if position == 0 {
		return
	}
	var calls []store.Settlement
	s.each(s.own, func(i int) {
		calls = append(calls, store.Settlement{
			Shard:  i,
			Stream: s.stream,
			Prev:   s.shards[i].cursor.Load(),
			Seq:    position,
			Oldest: s.history.firstBefore(s.cfg.CounterRetention, time.Now()),
		})
	})
	failed, err := s.settleAll(ctx, bus.Message{Seq: position}, calls)
	if err != nil {
		return // ctx ended
	}
	for i, why := range failed {
		s.park(i, why)
	}
}

// observe notes where the stream stands, for the metrics and for what follows from its age.
func (s *Service) observe(ctx context.Context, now time.Time) {
	s.metrics.parked.Set(float64(store.Shards - s.count(upToDate)))
	state, err := s.bus.Stream(ctx, events.StreamResponses)
	if err != nil || state.ID != s.incarnation.Load() {
		return
	}
	low, known := s.lowest()
	if !known {
		return
	}
	s.turn.Lock()
	defer s.turn.Unlock()
	s.history.note(now, state.First, state.Last)
	s.metrics.lag.Set(float64(state.Last - min(low, state.Last)))
	s.metrics.lagSeconds.Set(s.history.waiting(low, now).Seconds())
}

// purge removes from the stream what every shard has settled and nobody may need any more.
func (s *Service) purge(ctx context.Context, now time.Time) {
	low, known := s.lowest()
	if !known {
		return // a shard's cursor may be anywhere
	}
	state, err := s.bus.Stream(ctx, events.StreamResponses)
	if err != nil || state.ID != s.incarnation.Load() {
		return
	}
	s.turn.Lock()
	below := s.purgeBelow(state, low, now)
	s.turn.Unlock()
	if below <= state.First {
		return
	}
	if err := s.bus.Purge(ctx, events.StreamResponses, below); err != nil {
		s.log.Warn().Err(err).Uint64("below", below).Msg("cannot purge settled messages; will try again")
		return
	}
	s.metrics.purged.Add(float64(below - state.First))
	s.log.Debug().Uint64("below", below).Msg("purged settled messages")
}

// purgeBelow is the first sequence to keep, low being the lowest cursor. Kept are:
//
//   - what a shard has not settled;
//   - Config.PurgeMargin messages that are settled, since a stale replica that
//     takes over rewinds its shards and needs them again;
//   - what is younger than Config.PurgeAge, for other readers of the stream. A
//     settler knows the age of what it saw arriving only, so it purges nothing
//     for that long after its start.
//
// The stream refuses new messages when it is full. So once it is more than half
// full, age no longer counts, and the margin is at most a quarter of what is stored.
func (s *Service) purgeBelow(state bus.StreamState, low uint64, now time.Time) uint64 {
	below, margin := low+1, s.cfg.PurgeMargin
	switch {
	case state.Bytes > maxBytes/2:
		margin = min(margin, state.Msgs/4)
	case s.cfg.PurgeAge > 0:
		below = min(below, s.history.lastBefore(s.cfg.PurgeAge, now)+1)
	}
	return below - min(margin, below)
}

// maxBytes is where the stream of responses is full.
var maxBytes = func() uint64 {
	for _, s := range events.Streams() {
		if s.Name == events.StreamResponses {
			return uint64(s.MaxBytes)
		}
	}
	return 0
}()

// history remembers where the stream stood when, for as long as anyone asks.
type history struct {
	retention time.Duration
	samples   []sample
}

type sample struct {
	at          time.Time
	first, last uint64
}

// sampleEvery is the history's resolution.
const sampleEvery = 10 * time.Second

// note adds a sample, unless the last one is too fresh.
func (h *history) note(now time.Time, first, last uint64) {
	if n := len(h.samples); n > 0 && now.Sub(h.samples[n-1].at) < sampleEvery {
		return
	}
	h.samples = append(h.samples, sample{now, first, last})
	// One sample from before the retention stays: it answers for the retention's beginning.
	if old := h.until(h.retention, now) - 1; old > 0 {
		h.samples = append(h.samples[:0], h.samples[old:]...)
	}
}

// reset forgets everything: another stream counts from elsewhere.
func (h *history) reset() { h.samples = nil }

// until is how many samples are at least age old.
func (h *history) until(age time.Duration, now time.Time) int {
	return sort.Search(len(h.samples), func(i int) bool { return now.Sub(h.samples[i].at) < age })
}

// firstBefore is the first sequence that the stream held age ago; 0 if that is not known.
func (h *history) firstBefore(age time.Duration, now time.Time) uint64 {
	if n := h.until(age, now); n > 0 {
		return h.samples[n-1].first
	}
	return 0
}

// lastBefore is the last sequence that the stream held age ago; 0 if that is not known.
func (h *history) lastBefore(age time.Duration, now time.Time) uint64 {
	if n := h.until(age, now); n > 0 {
		return h.samples[n-1].last
	}
	return 0
}

// waiting is how long the oldest message above seq has been waiting, to the
// history's resolution; 0 if all that was noted is at or below seq.
func (h *history) waiting(seq uint64, now time.Time) time.Duration {
	i := sort.Search(len(h.samples), func(i int) bool { return h.samples[i].last > seq })
	if i == len(h.samples) {
		return 0
	}
	return now.Sub(h.samples[i].at)
}

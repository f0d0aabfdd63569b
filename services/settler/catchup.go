package settler

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

const (
	// together is how far apart the cursors of shards that catch up together may be,
	// in messages. The nearest go first, so that a hiccup is over at once even while
	// a shard that was away for an hour has a million messages to read.
	together = 10_000
	// session is how long they read, from the first message on, before the shards parked meanwhile
	// are looked at.
	session = 2 * time.Second
	// firstMessage bounds the wait for it, and for all later ones.
	firstMessage = 10 * time.Second
	// closeIn is how many messages behind it the main reader is made to wait, so that
	// traffic as fast as settlement can't keep a shard from catching up.
	closeIn = 256
)

// catchUp brings parked shards back to the main reader, until ctx ends.
func (s *Service) catchUp(ctx context.Context) {
	for ctx.Err() == nil {
		due, wait := s.due()
		if len(due) == 0 {
			t := time.NewTimer(wait)
			select {
			case <-ctx.Done():
			case <-s.wake:
			case <-t.C:
			}
			t.Stop()
			continue
		}
		state, err := s.bus.Stream(ctx, events.StreamResponses)
		if err != nil || state.ID != s.incarnation.Load() {
			// NATS is away, or the main reader is about to find another stream.
			s.giveBack(unreachable)
			continue
		}
		s.look(ctx, state, due)
		s.bring(ctx, state)
		s.giveBack(look)
	}
}

// due takes the parked shards whose time has come, else says when that of the next comes.
func (s *Service) due() (due []int, wait time.Duration) {
	s.turn.Lock()
	defer s.turn.Unlock()
	wait = math.MaxInt64
	now := time.Now()
	s.each(parked, func(i int) {
		left := s.shards[i].retry.Sub(now)
		if left > 0 || s.incarnation.Load() == "" {
			wait = min(wait, max(left, streamRetry))
			return
		}
		s.shards[i].owner.Store(catchingUp)
		due = append(due, i)
	})
	return due, wait
}

// giveBack parks what the catch-up reader still holds.
func (s *Service) giveBack(why reason) {
	s.turn.Lock()
	defer s.turn.Unlock()
	s.each(catchingUp, func(i int) { s.park(i, why) })
}

// look reads the stored cursor of each shard, and begins those that have none.
// Those that don't answer are parked again.
func (s *Service) look(ctx context.Context, state bus.StreamState, due []int) {
	var begun beginnings
	defer begun.log(s.log, state)
	var wg sync.WaitGroup
	slots := make(chan struct{}, s.cfg.Parallel)
	for _, i := range due {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			cursor, err := s.cursorOf(ctx, state, i, &begun)
			if err != nil {
				level := zerolog.DebugLevel
				if errors.Is(err, store.ErrState) { // no outage: it will not pass by itself
					level = zerolog.ErrorLevel
				}
				s.log.WithLevel(level).Err(err).Int("shard", i).Msg("the shard's settlement state can't be read yet")
				s.turn.Lock()
				defer s.turn.Unlock()
				s.park(i, unreachable)
				return
			}
			s.shards[i].cursor.Store(cursor)
			s.shards[i].known.Store(true)
		})
	}
	wg.Wait()
}

// cursorOf is where settlement of a shard goes on.
func (s *Service) cursorOf(ctx context.Context, state bus.StreamState, i int, begun *beginnings) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.StoreTimeout)
	defer cancel()
	meta, err := s.store.Meta(ctx, i)
	if err != nil {
		return 0, err
	}
	first := max(state.First, 1) // a new stream may say 0
	before, known := s.shards[i].cursor.Load(), s.shards[i].known.Load()
	switch {
	case meta.Epoch == "":
		return s.begin(ctx, state, i, state.Last, begun, "shards have no settlement state, being new or lost; settlement starts at the end of the stream")
	case meta.Stream != state.ID:
		return s.begin(ctx, state, i, first-1, begun, "shards were settled from another stream; settlement starts at the beginning of this one")
	case known && meta.Cursor < before:
		s.metrics.rewinds.Inc()
		s.log.Warn().Int("shard", i).Uint64("from", before).Uint64("to", meta.Cursor).
			Msg("the store has gone back in time; settling again what it lost")
	}
	if meta.Cursor > state.Last {
		if state, err = s.bus.Stream(ctx, events.StreamResponses); err != nil { // it has perhaps grown since
			return 0, err
		}
	}
	if s.shards[i].restored.Load() || meta.Cursor > state.Last {
		if meta, err = s.store.Rebase(ctx, i, state.ID, meta.Cursor, first-1); err != nil {
			return 0, err
		}
		s.shards[i].restored.Store(false)
		begun.add("the stream was restored from a backup, and ends before what was settled; all of it is read again, and what was settled is known by its batch",
			beginning{shard: i, cursor: meta.Cursor, settledTo: before})
		return meta.Cursor, nil
	}
	if first > meta.Cursor+1 {
		s.metrics.expired.Add(float64(first - 1 - meta.Cursor))
		s.log.Error().Int("shard", i).Uint64("cursor", meta.Cursor).Uint64("first", first).
			Msg("messages left the stream before they were settled")
	}
	return meta.Cursor, nil
}

// begin places the cursor of a shard that has none in this stream.
func (s *Service) begin(ctx context.Context, state bus.StreamState, i int, cursor uint64, begun *beginnings, why string) (uint64, error) {
	meta, err := s.store.Begin(ctx, i, state.ID, cursor)
	if err != nil {
		return 0, err
	}
	s.metrics.losses.Inc()
	begun.add(why, beginning{shard: i, cursor: meta.Cursor, settledTo: s.shards[i].cursor.Load()})
	return meta.Cursor, nil
}

// beginnings collects the shards that begin, so that a Redis that lost all of them
// is one line in the log. Safe for concurrent use.
type beginnings struct {
	mu  sync.Mutex
	why map[string][]beginning
}

// beginning is a shard whose cursor was placed; settledTo is how far this settler had seen it settled, 0 if never.
type beginning struct {
	shard             int
	cursor, settledTo uint64
}

func (b *beginnings) add(why string, one beginning) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.why == nil {
		b.why = make(map[string][]beginning)
	}
	b.why[why] = append(b.why[why], one)
}

// log is a warning, except where the stream has never held anything that could be passed over.
func (b *beginnings) log(log zerolog.Logger, state bus.StreamState) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for why, all := range b.why {
		level := zerolog.WarnLevel
		if state.Last == 0 {
			level = zerolog.InfoLevel
		}
		shards := make([]int, len(all))
		cursor, settledTo := uint64(math.MaxUint64), uint64(0)
		for i, one := range all {
			shards[i], cursor, settledTo = one.shard, min(cursor, one.cursor), max(settledTo, one.settledTo)
		}
		slices.Sort(shards)
		log.WithLevel(level).Ints("shards", shards).Uint64("cursor", cursor).Uint64("settled_to", settledTo).
			Uint64("first", state.First).Uint64("last", state.Last).Msg(why)
	}
}

// errPause ends a session of the catch-up reader.
var errPause = errors.New("settler: enough for now")

// bring reads the stream for the shards nearest to its end, from the lowest of
// their cursors, and hands them to the main reader when it has reached that one.
// Shards that are not ready by then stay the catch-up reader's.
func (s *Service) bring(ctx context.Context, state bus.StreamState) {
	near, start := uint64(0), uint64(math.MaxUint64)
	s.each(catchingUp, func(i int) { near = max(near, s.shards[i].cursor.Load()) })
	s.turn.Lock()
	s.each(catchingUp, func(i int) {
		if c := s.shards[i].cursor.Load(); c+together >= near {
			start = min(start, c)
		} else {
			s.park(i, look) // after these
		}
	})
	start = max(start, state.First-min(state.First, 1)) // below it there is nothing to read
	done := s.count(catchingUp) == 0 || s.handOver(start)
	s.turn.Unlock()
	if done {
		return
	}

	holding := false // the turn
	hold := func() {
		if !holding {
			s.turn.Lock()
			holding = true
		}
	}
	r := reader{s, state.ID, catchingUp}
	reached := uint64(0)
	var begun time.Time
	within, cancel := context.WithTimeout(ctx, firstMessage+s.session)
	defer cancel()
	err := s.bus.Follow(within, events.StreamResponses, bus.FromSeq(start+1), func(m bus.Message) error {
		if begun.IsZero() {
			begun = time.Now()
		}
		if m.Seq+closeIn >= s.position.Load() {
			hold()
		}
		failed, err := r.apply(within, m)
		if err != nil {
			return err
		}
		reached = m.Seq
		if len(failed) > 0 {
			if !holding { // for a moment only: one dead shard is no reason to make the main reader wait
				s.turn.Lock()
				defer s.turn.Unlock()
			}
			for i, why := range failed {
				s.park(i, why)
			}
		}
		if s.count(catchingUp) == 0 || holding && s.handOver(reached) || time.Since(begun) > s.session {
			return errPause
		}
		return nil
	}, bus.OfStream(state.ID))
	if !errors.Is(err, errPause) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
		s.log.Warn().Err(err).Msg("catching up was interrupted")
	}
	// The next session begins at the lowest cursor: without this, an idle shard's would
	// keep it where this one began, and a long backlog would never be read to its end.
	hold()
	r.advance(ctx, reached)
	s.turn.Unlock()
}

// handOver gives the catch-up reader's shards, settled up to done, to the main
// reader if that is no further. The caller has the turn.
func (s *Service) handOver(done uint64) bool {
	if done < s.position.Load() {
		return false
	}
	s.each(catchingUp, func(i int) {
		s.shards[i].failures = 0
		s.shards[i].owner.Store(upToDate)
	})
	return true
}

package settler

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// consume is the main reader: it follows the stream from its end and settles
// every message into the shards that are up to date. When the stream turns out
// to be another one, it starts over.
func (s *Service) consume(ctx context.Context) {
	for ctx.Err() == nil {
		state, err := s.bus.Stream(ctx, events.StreamResponses)
		if err != nil {
			s.log.Debug().Err(err).Msg("waiting for the stream of responses")
			pause(ctx, streamRetry)
			continue
		}
		s.turn.Lock()
		// The same one, and yet not what was read: it was restored from a backup.
		restored := s.incarnation.Load() == state.ID
		s.log.Info().Str("stream", state.ID).Uint64("first", state.First).Uint64("last", state.Last).Msg("reading responses")
		s.incarnation.Store(state.ID)
		s.position.Store(state.Last)
		s.seen.Store(0)
		s.history.reset()
		for i := range s.shards {
			if restored {
				s.shards[i].restored.Store(true)
			}
			s.park(i, look)
		}
		s.turn.Unlock()

		r := reader{s, state.ID, upToDate}
		err = s.bus.Follow(ctx, events.StreamResponses, bus.FromSeq(state.Last+1), func(m bus.Message) error {
			return r.take(ctx, m)
		}, bus.OfStream(state.ID))
		if ctx.Err() == nil {
			s.log.Warn().Err(err).Msg("the stream of responses is another one; starting over")
		}
	}
}

// streamRetry is the pause before a stream that is not there is looked for again.
const streamRetry = 200 * time.Millisecond

// reader settles the messages of one stream into the shards of one owner.
type reader struct {
	*Service
	stream string
	own    owner
}

// take is the main reader's turn with one message.
func (s reader) take(ctx context.Context, m bus.Message) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	if m.Seq > s.position.Load()+1 {
		// Messages are missing. Other settlers purge what they have settled, so all may
		// be well, but only the stored cursors can tell.
		s.each(upToDate, func(i int) { s.park(i, look) })
	}
	failed, err := s.apply(ctx, m)
	if err != nil {
		return err
	}
	for i, why := range failed {
		s.park(i, why)
	}
	s.position.Store(m.Seq)
	return nil
}

// each calls fn for every shard of an owner.
func (s *Service) each(o owner, fn func(shard int)) {
	for i := range s.shards {
		if s.shards[i].owner.Load() == o {
			fn(i)
		}
	}
}

// reason says why a shard is parked.
type reason uint8

const (
	// look: its stored cursor has to be read; at once.
	look reason = iota
	// unreachable: its store did not answer; with a pause that grows.
	unreachable
)

// park takes a shard from its reader. The caller has the turn.
func (s *Service) park(i int, why reason) {
	const first, most, doublings = 50 * time.Millisecond, 5 * time.Second, 7
	sh := &s.shards[i]
	sh.retry = time.Now()
	if why == unreachable {
		sh.retry = sh.retry.Add(min(most, first<<min(sh.failures, doublings)))
		sh.failures++
	}
	sh.owner.Store(parked)
	select {
	case s.wake <- struct{}{}:
	default: // a wake-up is pending already
	}
}

// apply settles one message into the reader's shards. It returns the shards
// that could not take it, to be parked; an error only where ctx ended before the
// message was dealt with, and then the message has to be read again.
func (s reader) apply(ctx context.Context, m bus.Message) (map[int]reason, error) {
	batch, err := events.Decode[events.ResponseBatch](m.Data)
	if err != nil {
		return nil, s.deadLetter(ctx, m, nil, err.Error())
	}
	items, t := fold(batch)
	calls := make([]store.Settlement, 0, len(items))
	for i, list := range items {
		st := store.Settlement{
			Shard:  i,
			Stream: s.stream,
			Prev:   s.shards[i].cursor.Load(),
			Seq:    m.Seq,
			Boot:   batch.Boot,
			N:      batch.N,
			Items:  list,
		}
		if err := st.Validate(); err != nil { // before anything of the message is applied
			return nil, s.deadLetter(ctx, m, nil, err.Error())
		}
		if s.shards[i].owner.Load() == s.own && st.Prev < m.Seq {
			calls = append(calls, st)
		}
	}
	if before := s.seen.Load(); before < m.Seq && s.seen.CompareAndSwap(before, m.Seq) {
		s.metrics.read(t)
	}
	return s.settleAll(ctx, m, calls)
}

// settleAll makes the calls of one message, Config.Parallel at a time.
func (s reader) settleAll(ctx context.Context, m bus.Message, calls []store.Settlement) (map[int]reason, error) {
	var (
		wg     sync.WaitGroup
		slots  = make(chan struct{}, s.cfg.Parallel)
		mu     sync.Mutex
		failed = map[int]reason{}
		ended  error
	)
	for _, st := range calls {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			ok, why, err := s.settle(ctx, m, st)
			if ok && err == nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				ended = err
			} else {
				failed[st.Shard] = why
			}
		})
	}
	wg.Wait()
	return failed, ended
}

// settle makes one call, and sets aside the items that the store can't take.
// Where it is not ok, the shard has to be parked.
func (s reader) settle(ctx context.Context, m bus.Message, st store.Settlement) (ok bool, why reason, err error) {
	for {
		done, err := s.call(ctx, st)
		var bad *store.StateError
		switch {
		case err == nil:
			return s.settled(st, done), look, nil
		case errors.As(err, &bad) && bad.Index >= 0 && bad.Index < len(st.Items):
			if err := s.setAside(ctx, m, st.Items[bad.Index], err); err != nil {
				return false, look, err
			}
			st.Items = append(st.Items[:bad.Index:bad.Index], st.Items[bad.Index+1:]...)
		case errors.Is(err, store.ErrInvalid):
			for _, item := range st.Items {
				if err := s.setAside(ctx, m, item, err); err != nil {
					return false, look, err
				}
			}
			st.Items = nil
		default:
			s.log.Warn().Err(err).Int("shard", st.Shard).Uint64("seq", m.Seq).Msg("the store takes no settlements; parking the shard")
			s.metrics.failures.Inc()
			return false, unreachable, nil
		}
	}
}

// setAside makes a dead letter of one item of a message.
func (s reader) setAside(ctx context.Context, m bus.Message, item store.Item, why error) error {
	of := &events.DeadBucket{Client: item.Client, Scope: item.Scope, Kind: item.Spec.Kind, Window: item.Window}
	return s.deadLetter(ctx, m, of, fmt.Sprintf("bucket %q of client %q: %v", item.Scope, item.Client, why))
}

// call is Store.Settle with a bound of its own: a call that was begun is finished
// when the settler stops, so that a clean stop leaves nothing unknown.
func (s *Service) call(ctx context.Context, st store.Settlement) (store.Settled, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.StoreTimeout)
	defer cancel()
	return s.store.Settle(ctx, st)
}

// settled takes note of an answer. It is false where the shard has to be looked at.
func (s *Service) settled(st store.Settlement, done store.Settled) bool {
	s.metrics.settled(st, done)
	sh := &s.shards[st.Shard]
	switch done.Status {
	case store.Applied, store.Duplicate, store.Behind:
		sh.cursor.Store(done.Cursor)
		s.tell(st, done)
		return true
	case store.Rewind:
		sh.cursor.Store(done.Cursor)
		s.log.Warn().Int("shard", st.Shard).Uint64("from", st.Prev).Uint64("to", done.Cursor).
			Msg("the store has gone back in time; settling again what it lost")
	default: // store.Lost; the catch-up reader says what follows
	}
	return false
}

// tell lets edges know which buckets are not what they remember: below zero, where leases must end, or
// given something back, where denials must. Who misses it is wrong for a second, or a lease's life.
func (s *Service) tell(st store.Settlement, done store.Settled) {
	var changed []events.ChangedBucket
	for i, after := range done.Items {
		b := events.ChangedBucket{Client: st.Items[i].Client, Scope: st.Items[i].Scope}
		switch {
		case st.Items[i].Delta < 0:
			b.Why = events.ChangedGain
		case after.Remaining < 0 && st.Items[i].Delta > 0:
			b.Why = events.ChangedDebt
		default:
			continue
		}
		changed = append(changed, b)
	}
	if len(changed) == 0 {
		return
	}
	data, err := events.Encode(events.BucketsChanged{Buckets: changed})
	if err == nil {
		err = s.bus.Send(events.SubjectChanged(st.Shard), data)
	}
	if err != nil {
		s.log.Debug().Err(err).Int("shard", st.Shard).Msg("edges are not told of changed buckets")
	}
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

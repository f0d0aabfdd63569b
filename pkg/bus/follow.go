package bus

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Start says where Follow begins.
type Start struct {
	policy jetstream.DeliverPolicy
	seq    uint64
	time   time.Time
}

// All begins with the first stored message.
func All() Start { return FromSeq(1) }

// FromSeq begins with the message of this sequence, or with the first stored one after it.
func FromSeq(seq uint64) Start {
	return Start{policy: jetstream.DeliverByStartSequencePolicy, seq: max(1, seq)}
}

// FromTime begins with the first message stored at t or later.
func FromTime(t time.Time) Start {
	return Start{policy: jetstream.DeliverByStartTimePolicy, time: t}
}

// LastPerSubject begins with the last message of every subject, in the order of
// their sequences; whatever comes later follows.
func LastPerSubject() Start { return Start{policy: jetstream.DeliverLastPerSubjectPolicy} }

// FollowOption changes one Follow.
type FollowOption func(*follower)

// Subjects restricts Follow to messages on these subjects.
func Subjects(subjects ...string) FollowOption {
	return func(f *follower) { f.subjects = subjects }
}

// OfStream makes Follow fail with ErrStreamReset unless the stream is the
// incarnation that StreamState.ID named.
func OfStream(id string) FollowOption {
	return func(f *follower) { f.id = id }
}

const (
	// prefetch bounds the messages in memory that fn has not seen yet.
	prefetch = 64
	// The server shows every heartbeatEvery that it still serves the consumer; two missed ones end a session.
	heartbeatEvery = 2 * time.Second
	pullExpiry     = 10 * time.Second
	// idleConsumer is how long the server keeps a consumer that nobody reads.
	idleConsumer = time.Minute
)

// Follow calls fn for each message of a stream, in order, one at a time, and
// goes on with what comes. Within one call no message is skipped or repeated,
// over reconnects, server restarts and while the stream is missing: those it
// waits out. It needs no acknowledgement and leaves nothing on the server.
//
// It returns when ctx ends (ctx.Err()), when fn fails (that error), or with
// ErrStreamReset when the stream is no longer the one it began with: made anew, or restored from a backup. Messages
// that the stream's limits or a purge removed before they were read are missing
// from Message.Seq; the caller sees the gap there.
func (b *Bus) Follow(ctx context.Context, stream string, from Start, fn func(Message) error, opts ...FollowOption) error {
	f := &follower{bus: b, stream: stream, from: from, fn: fn}
	for _, opt := range opts {
		opt(f)
	}
	var complain nag
	wait := newBackoff(50*time.Millisecond, 2*time.Second)
	for {
		connect := b.nextConnect()
		err := f.session(ctx)
		var own callbackError
		switch {
		case errors.As(err, &own):
			return own.error
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrStreamReset):
			return err
		}
		if b.Connected() && complain.due(10*time.Second) {
			b.log.Warn().Err(err).Str("stream", stream).Msg("cannot read the stream; still trying")
		}
		if f.progress {
			f.progress = false
			wait.reset()
		}
		if err := wait.sleep(ctx, connect); err != nil {
			return err
		}
	}
}

// callbackError marks an error of the caller's function.
type callbackError struct{ error }

// follower is one Follow. nats.go has such a consumer (OrderedConsumer), but it
// goes on silently when the stream was made anew, from a sequence that means
// something else there, and waits up to ten seconds after a restart.
type follower struct {
	bus      *Bus
	stream   string
	subjects []string
	from     Start
	fn       func(Message) error

	id       string // of the stream; "" before the first session
	progress bool   // a message came since the last pause
	// last is the message before from, once there was one: each session begins with it, to see that the
	// stream is still the one that was read.
	last struct {
		seq uint64
		at  time.Time
	}
}

// session reads the stream through one consumer, until that breaks.
func (f *follower) session(ctx context.Context) error {
	b := f.bus
	// A lost connection ends the session: the consumer may be gone, or what it sent lost.
	ctx, cancel := b.calls.begin(ctx, apiOf(f.stream))
	defer cancel()
	if !b.Connected() {
		return fmt.Errorf("%w: not connected", ErrUnavailable)
	}
	cons, err := f.consumer(ctx)
	if err != nil {
		return err
	}
	defer f.remove(cons.CachedInfo().Name)
	// After the consumer was made: so it belongs to the stream that is looked at here, or is dead.
	if err := f.check(ctx); err != nil {
		return err
	}
	messages, err := cons.Messages(
		jetstream.PullMaxMessages(prefetch),
		jetstream.PullHeartbeat(heartbeatEvery),
		jetstream.PullExpiry(pullExpiry),
		jetstream.WithMessagesErrOnMissingHeartbeat(true),
	)
	if err != nil {
		return classify(ctx, err)
	}
	defer messages.Stop()
	for delivered := uint64(1); ; delivered++ {
		m, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return classify(ctx, err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return fmt.Errorf("message of stream %s: %w", f.stream, err)
		}
		if meta.Sequence.Consumer != delivered {
			return fmt.Errorf("%w: stream %s: message %d of the consumer did not arrive", ErrUnavailable, f.stream, delivered)
		}
		if meta.Sequence.Stream == f.last.seq {
			if !meta.Timestamp.Equal(f.last.at) {
				return fmt.Errorf("%w: stream %s has another message %d than before", ErrStreamReset, f.stream, f.last.seq)
			}
			continue
		}
		err = f.fn(Message{
			Subject: m.Subject(),
			Data:    m.Data(),
			Header:  m.Headers(),
			Seq:     meta.Sequence.Stream,
			Time:    meta.Timestamp,
			Pending: meta.NumPending,
		})
		if err != nil {
			return callbackError{err}
		}
		f.from = FromSeq(meta.Sequence.Stream + 1)
		f.last.seq, f.last.at = meta.Sequence.Stream, meta.Timestamp
		f.progress = true
	}
}

func (f *follower) consumer(ctx context.Context) (jetstream.Consumer, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	cfg := jetstream.ConsumerConfig{
		Name:              "follow-" + rand.Text(),
		DeliverPolicy:     f.from.policy,
		OptStartSeq:       f.from.seq,
		FilterSubjects:    f.subjects,
		AckPolicy:         jetstream.AckNonePolicy,
		InactiveThreshold: idleConsumer,
		MemoryStorage:     true,
		Replicas:          1,
	}
	if f.last.seq > 0 {
		cfg.OptStartSeq = f.last.seq
	}
	if !f.from.time.IsZero() {
		cfg.OptStartTime = &f.from.time
	}
	if f.from.policy == jetstream.DeliverLastPerSubjectPolicy && len(f.subjects) == 0 {
		cfg.FilterSubjects = []string{">"} // the server wants it named
	}
	cons, err := f.bus.js.CreateConsumer(ctx, f.stream, cfg)
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", f.stream, classify(ctx, err))
	}
	return cons, nil
}

// check makes sure that the stream is still the one that was read so far.
func (f *follower) check(ctx context.Context) error {
	state, err := f.bus.Stream(ctx, f.stream)
	if err != nil {
		return err
	}
	if f.id == "" {
		f.id = state.ID
	}
	if state.ID != f.id {
		return fmt.Errorf("%w: stream %s was made %s, the one followed %s", ErrStreamReset, f.stream, state.ID, f.id)
	}
	if f.from.seq > state.Last+1 {
		return fmt.Errorf("%w: stream %s ends at %d, before %d", ErrStreamReset, f.stream, state.Last, f.from.seq)
	}
	return nil
}

// remove spares the server the wait until it forgets the consumer by itself.
func (f *follower) remove(consumer string) {
	if !f.bus.Connected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	ctx, stop := f.bus.calls.begin(ctx, apiOf(f.stream))
	defer stop()
	if err := f.bus.js.DeleteConsumer(ctx, f.stream, consumer); err != nil {
		f.bus.log.Debug().Err(err).Str("stream", f.stream).Msg("left a consumer to expire")
	}
}

package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/aegisrate/aegisrate/pkg/events"
)

// StreamState is what a stream holds.
type StreamState struct {
	// ID names this incarnation: a stream deleted and made anew has another.
	ID string
	// First and Last are sequences; an empty stream has First = Last+1, a new one 1 and 0
	// or 0 and 0.
	First uint64
	Last  uint64
	Msgs  uint64
	Bytes uint64
}

// Provision creates the streams that are missing and updates the others. It is
// idempotent, and several services may do it at once.
func (b *Bus) Provision(ctx context.Context, streams []events.Stream) error {
	for _, s := range streams {
		if err := b.provision(ctx, s); err != nil {
			return fmt.Errorf("provision stream %s: %w", s.Name, err)
		}
	}
	return nil
}

func (b *Bus) provision(ctx context.Context, s events.Stream) error {
	ctx, stop := b.call(ctx, s.Name)
	defer stop()
	cfg := jetstream.StreamConfig{
		Name:              s.Name,
		Description:       s.Description,
		Subjects:          s.Subjects,
		Storage:           jetstream.FileStorage,
		Retention:         jetstream.LimitsPolicy,
		Discard:           jetstream.DiscardOld,
		MaxAge:            s.MaxAge,
		MaxBytes:          unbounded(s.MaxBytes),
		MaxMsgsPerSubject: unbounded(s.MaxPerSubject),
		MaxMsgSize:        unbounded(s.MaxMessage),
		Duplicates:        s.Dedup,
		MaxMsgs:           unbounded(s.MaxMessages),
		Replicas:          b.replicas,
		AllowDirect:       s.KeyValue,
		AllowRollup:       s.KeyValue,
		DenyDelete:        s.KeyValue,
	}
	if s.RefuseNew {
		cfg.Discard = jetstream.DiscardNew
		cfg.DiscardNewPerSubject = s.RefuseNewPerSubject
	}
	if s.WorkQueue {
		cfg.Retention = jetstream.WorkQueuePolicy
	}
	if _, err := b.js.CreateOrUpdateStream(ctx, cfg); err != nil {
		return classify(ctx, err)
	}
	return nil
}

// unbounded gives a bound of zero the server's word for none.
func unbounded[N int32 | int64](n N) N {
	if n == 0 {
		return -1
	}
	return n
}

// Stream gives the state of a stream.
func (b *Bus) Stream(ctx context.Context, name string) (StreamState, error) {
	ctx, stop := b.call(ctx, name)
	defer stop()
	s, err := b.js.Stream(ctx, name)
	if err != nil {
		return StreamState{}, fmt.Errorf("state of stream %s: %w", name, classify(ctx, err))
	}
	return stateOf(s.CachedInfo()), nil
}

func stateOf(info *jetstream.StreamInfo) StreamState {
	return StreamState{
		ID:    info.Created.UTC().Format(time.RFC3339Nano),
		First: info.State.FirstSeq,
		Last:  info.State.LastSeq,
		Msgs:  info.State.Msgs,
		Bytes: info.State.Bytes,
	}
}

// Last gives the last message on subject, ErrNotFound where there is none.
func (b *Bus) Last(ctx context.Context, stream, subject string) (Message, error) {
	ctx, stop := b.call(ctx, stream)
	defer stop()
	s, err := b.js.Stream(ctx, stream)
	if err != nil {
		return Message{}, fmt.Errorf("last message on %s: %w", subject, classify(ctx, err))
	}
	m, err := s.GetLastMsgForSubject(ctx, subject)
	if err != nil {
		return Message{}, fmt.Errorf("last message on %s: %w", subject, classify(ctx, err))
	}
	return Message{Subject: m.Subject, Data: m.Data, Header: m.Header, Seq: m.Sequence, Time: m.Time}, nil
}

// At gives the message of that sequence, ErrNotFound where the stream has it no more or not yet.
func (b *Bus) At(ctx context.Context, stream string, seq uint64) (Message, error) {
	ctx, stop := b.call(ctx, stream)
	defer stop()
	s, err := b.js.Stream(ctx, stream)
	if err != nil {
		return Message{}, fmt.Errorf("message %d of %s: %w", seq, stream, classify(ctx, err))
	}
	m, err := s.GetMsg(ctx, seq)
	if err != nil {
		return Message{}, fmt.Errorf("message %d of %s: %w", seq, stream, classify(ctx, err))
	}
	return Message{Subject: m.Subject, Data: m.Data, Header: m.Header, Seq: m.Sequence, Time: m.Time}, nil
}

// headerKVOperation marks what was deleted from a KV bucket.
const headerKVOperation = "KV-Operation"

// Get gives the last message on a subject of a KV bucket's stream, in one round trip; ErrNotFound where
// there is none. A key that was deleted has a message without data.
func (b *Bus) Get(ctx context.Context, stream, subject string) (Message, error) {
	request := "$JS.API.DIRECT.GET." + stream + "." + subject
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	ctx, stop := b.calls.begin(ctx, exactly(request))
	defer stop()
	m, err := b.conn.RequestWithContext(ctx, request, nil)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		err = jetstream.ErrStreamNotFound
	case err == nil && m.Header.Get("Status") == "404":
		err = jetstream.ErrMsgNotFound
	case err == nil && m.Header.Get("Status") != "":
		err = errors.New(m.Header.Get("Status") + " " + m.Header.Get("Description"))
	}
	if err != nil {
		return Message{}, fmt.Errorf("get %s: %w", subject, classify(ctx, err))
	}
	seq, err := strconv.ParseUint(m.Header.Get(jetstream.SequenceHeader), 10, 64)
	if err != nil {
		return Message{}, fmt.Errorf("get %s: %w: no sequence in the answer", subject, ErrUnavailable)
	}
	at, err := time.Parse(time.RFC3339Nano, m.Header.Get(jetstream.TimeStampHeaer))
	if err != nil {
		return Message{}, fmt.Errorf("get %s: %w: no time in the answer", subject, ErrUnavailable)
	}
	return Message{Subject: subject, Data: m.Data, Header: m.Header, Seq: seq, Time: at}, nil
}

// Purge removes the messages of a stream whose sequence is below the given one.
func (b *Bus) Purge(ctx context.Context, stream string, below uint64) error {
	if below == 0 {
		return errors.New("bus: purge below 0 would purge everything")
	}
	ctx, stop := b.call(ctx, stream)
	defer stop()
	s, err := b.js.Stream(ctx, stream)
	if err == nil {
		err = s.Purge(ctx, jetstream.WithPurgeSequence(below))
	}
	if err != nil {
		return fmt.Errorf("purge stream %s below %d: %w", stream, below, classify(ctx, err))
	}
	return nil
}

// call bounds a JetStream request about one stream, and ends it when no answer can come.
func (b *Bus) call(ctx context.Context, stream string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	ctx, stop := b.calls.begin(ctx, apiOf(stream))
	return ctx, func() { stop(); cancel() }
}

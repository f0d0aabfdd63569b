package bus

import (
	"context"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// PublishOption changes one Publish.
type PublishOption func(*publishOptions)

type publishOptions struct {
	js     []jetstream.PublishOpt
	header nats.Header
}

// WithDelete makes the message the delete marker of a key in a KV bucket; its data must be empty.
func WithDelete() PublishOption {
	return func(o *publishOptions) { o.header = nats.Header{headerKVOperation: []string{"DEL"}} }
}

// WithMsgID names the message: within the stream's dedup window a second one
// of the same id is acknowledged and not stored.
func WithMsgID(id string) PublishOption {
	return func(o *publishOptions) { o.js = append(o.js, jetstream.WithMsgID(id)) }
}

// WithLastSeq makes Publish fail with ErrConflict unless seq is the stream's last.
func WithLastSeq(seq uint64) PublishOption {
	return func(o *publishOptions) { o.js = append(o.js, jetstream.WithExpectLastSequence(seq)) }
}

// WithLastSubjectSeq makes Publish fail with ErrConflict unless seq is the last
// on the message's subject; 0 expects none.
func WithLastSubjectSeq(seq uint64) PublishOption {
	return func(o *publishOptions) { o.js = append(o.js, jetstream.WithExpectLastSequencePerSubject(seq)) }
}

// Publish stores a message in the stream that takes subject and gives its
// sequence. It waits for the acknowledgement, five seconds at most. After
// ErrUnavailable the message may have been stored; any other error says that
// it was not. It does not retry.
func (b *Bus) Publish(ctx context.Context, subject string, data []byte, opts ...PublishOption) (seq uint64, err error) {
	var o publishOptions
	for _, opt := range opts {
		opt(&o)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	ctx, stop := b.calls.begin(ctx, exactly(subject))
	defer stop()
	ack, err := b.js.PublishMsg(ctx, &nats.Msg{Subject: subject, Data: data, Header: o.header}, append(o.js, jetstream.WithRetryAttempts(0))...)
	if err != nil {
		return 0, fmt.Errorf("publish to %s: %w", subject, classify(ctx, err))
	}
	return ack.Sequence, nil
}

type outgoing struct {
	subject string
	data    []byte
}

// Send publishes a core message: whoever listens now gets it, nobody confirms
// it. It never waits for the network. The error is ErrUnavailable when there is
// no connection or too much is waiting already; the caller must not change data afterwards.
func (b *Bus) Send(subject string, data []byte) error {
	select {
	case <-b.closing:
		return fmt.Errorf("send to %s: %w: closed", subject, ErrUnavailable)
	default:
	}
	if !b.Connected() {
		b.dropped.Add(1)
		return fmt.Errorf("send to %s: %w: not connected", subject, ErrUnavailable)
	}
	select {
	case b.outgoing <- outgoing{subject, data}:
		return nil
	default:
		b.dropped.Add(1)
		return fmt.Errorf("send to %s: %w: %d messages wait already", subject, ErrUnavailable, sendQueue)
	}
}

// sender is the only one that a server reading slowly can hold up.
func (b *Bus) sender() {
	defer close(b.sent)
	for {
		select {
		case m := <-b.outgoing:
			b.send(m)
		case <-b.closing:
			for {
				select {
				case m := <-b.outgoing:
					b.send(m)
				default:
					return
				}
			}
		}
	}
}

func (b *Bus) send(m outgoing) {
	if err := b.conn.Publish(m.subject, m.data); err != nil {
		b.dropped.Add(1)
	}
}

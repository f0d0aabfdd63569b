package bus

import (
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
)

// Message is one received message. Seq, Time and Pending are set for messages of a stream only.
type Message struct {
	Subject string
	Data    []byte
	Header  map[string][]string
	// Seq is the sequence in the stream, Time when the server stored it.
	Seq  uint64
	Time time.Time
	// Pending is how many messages of the same Follow wait behind this one.
	Pending uint64
	Reply   string
}

// Subscription is a running Subscribe or Serve.
type Subscription interface {
	// Stop ends it. A call of its function that runs already may still finish.
	Stop()
}

type stopFunc func()

func (f stopFunc) Stop() { f() }

// Subscribe calls fn for each core message on subject, one at a time, in the
// order of each publisher. It lasts over reconnects; what is sent while the
// connection is away is missed.
func (b *Bus) Subscribe(subject string, fn func(Message)) (Subscription, error) {
	sub, err := b.conn.Subscribe(subject, func(m *nats.Msg) {
		fn(Message{Subject: m.Subject, Data: m.Data, Header: m.Header, Reply: m.Reply})
	})
	if err != nil {
		return nil, fmt.Errorf("subscribe to %s: %w: %w", subject, ErrUnavailable, err)
	}
	return stopFunc(func() {
		if err := sub.Unsubscribe(); err != nil && !b.conn.IsClosed() {
			b.log.Warn().Err(err).Str("subject", subject).Msg("cannot unsubscribe")
		}
	}), nil
}

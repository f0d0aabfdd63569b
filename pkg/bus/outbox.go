package bus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// OutboxConfig says what an Outbox publishes, and within which bounds.
type OutboxConfig[T any] struct {
	// Subject must be taken by a stream with a dedup window.
	Subject string
	// ID begins every message id, "<ID>-<n>"; no other outbox may ever use it on the same stream.
	ID string
	// Encode gives the message of batch n. It runs once a batch, unless the message proves too large.
	Encode func(n uint64, batch []T) ([]byte, error)
	// A batch is closed at MaxBatch items (default 256) or MaxWait after its first (default 10 ms).
	MaxBatch int
	MaxWait  time.Duration
	// MaxQueued bounds the items that wait, those in flight included (default 100,000).
	MaxQueued int
	// MaxBytes bounds a message (default 768 KiB); a batch above it is halved.
	MaxBytes int
	Log      zerolog.Logger
}

// OutboxStats is a moment of an Outbox. Queued, Lost and Published count items.
type OutboxStats struct {
	// Queued wait or are in flight; Oldest is the age of the first of them.
	Queued int
	Oldest time.Duration
	// Published are stored; Lost exceeded MaxQueued, could not be encoded, or were left at Close.
	Published uint64
	Lost      uint64
}

// Outbox publishes items in batches, in order, so that each acknowledged batch
// is stored exactly once: one batch is in flight at a time, and it is repeated
// under the same id, with the same bytes, until the stream has acknowledged it.
// Batches are numbered from 1 without a gap; n and ID let a reader recognise a
// repetition that came after the dedup window.
//
// Add may be called at any time from anywhere, Run once.
type Outbox[T any] struct {
	bus *Bus
	cfg OutboxConfig[T]

	mu        sync.Mutex
	queue     []queued[T]
	closed    bool
	published uint64
	lost      uint64
	wake      chan struct{} // holds a token when the queue has become worth a look

	turn    chan struct{} // held by whoever publishes: Run, then Close
	closing chan struct{}
	n       uint64  // of the last batch sealed; with flight guarded by turn
	flight  *sealed // the batch in flight; it is the head of queue
	lossNag nag
	failNag nag
}

type queued[T any] struct {
	item T
	at   time.Time
}

// sealed is a batch whose bytes and id no longer change.
type sealed struct {
	id    string
	data  []byte
	items int
}

// How long publishing may fail before it is an alarm, and how often alarms repeat.
const (
	failAlarmAfter = time.Second
	alarmEvery     = 10 * time.Second
)

// NewOutbox gives an Outbox that publishes once Run runs.
func NewOutbox[T any](b *Bus, cfg OutboxConfig[T]) *Outbox[T] {
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&cfg.MaxBatch, 256)
	def(&cfg.MaxQueued, 100_000)
	def(&cfg.MaxBytes, 768<<10)
	if cfg.MaxWait <= 0 {
		cfg.MaxWait = 10 * time.Millisecond
	}
	return &Outbox[T]{
		bus:     b,
		cfg:     cfg,
		wake:    make(chan struct{}, 1),
		turn:    make(chan struct{}, 1),
		closing: make(chan struct{}),
	}
}

// Add queues an item. It never blocks; false says that the outbox is full or
// closed, and the item counted as lost.
func (o *Outbox[T]) Add(item T) bool {
	o.mu.Lock()
	if o.closed || len(o.queue) >= o.cfg.MaxQueued {
		o.lost++
		o.mu.Unlock()
		o.alarmLoss("the outbox is full or closed")
		return false
	}
	o.queue = append(o.queue, queued[T]{item, time.Now()})
	look := len(o.queue) == 1 || len(o.queue)%o.cfg.MaxBatch == 0
	o.mu.Unlock()
	if look {
		o.nudge()
	}
	return true
}

func (o *Outbox[T]) nudge() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// Stats gives the state of this moment.
func (o *Outbox[T]) Stats() OutboxStats {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := OutboxStats{Queued: len(o.queue), Published: o.published, Lost: o.lost}
	if len(o.queue) > 0 {
		s.Oldest = time.Since(o.queue[0].at)
	}
	return s
}

// Run publishes until ctx ends or Close is called, and returns nil. A batch in
// flight then stays at the head of the queue, for Close.
func (o *Outbox[T]) Run(ctx context.Context) error {
	o.turn <- struct{}{}
	defer func() { <-o.turn }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-o.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	for o.await(ctx) == nil {
		if o.publish(ctx) != nil {
			break
		}
	}
	return nil
}

// Close ends Run, publishes what is queued and waits for its acknowledgement.
// What is left when ctx ends is counted as lost, and the error says how much;
// the batch that was in flight then may yet have been stored.
func (o *Outbox[T]) Close(ctx context.Context) error {
	o.mu.Lock()
	if o.closed {
		o.mu.Unlock()
		return nil
	}
	o.closed = true
	o.mu.Unlock()
	close(o.closing)
	select {
	case o.turn <- struct{}{}:
		defer func() { <-o.turn }()
	case <-ctx.Done():
		return o.abandon(ctx.Err())
	}
	for o.Stats().Queued > 0 {
		if err := o.publish(ctx); err != nil {
			return o.abandon(err)
		}
	}
	return nil
}

// abandon gives up what is queued.
func (o *Outbox[T]) abandon(cause error) error {
	o.mu.Lock()
	left := len(o.queue)
	o.lost += uint64(left)
	o.queue = nil
	o.mu.Unlock()
	return fmt.Errorf("outbox %s: closed with %d items unpublished: %w", o.cfg.Subject, left, cause)
}

// await returns when a batch is due: in flight from before, full, or MaxWait
// old. Its error is that of ctx.
func (o *Outbox[T]) await(ctx context.Context) error {
	for ctx.Err() == nil {
		due, wait := o.due()
		if due {
			return nil
		}
		var timer <-chan time.Time // nil waits for ever
		if wait > 0 {
			timer = time.After(wait)
		}
		select {
		case <-ctx.Done():
		case <-o.wake:
		case <-timer:
		}
	}
	return ctx.Err()
}

// due says whether a batch is due, or in how long (0: not while the queue is empty).
func (o *Outbox[T]) due() (bool, time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case len(o.queue) == 0:
		return false, 0
	case o.flight != nil, len(o.queue) >= o.cfg.MaxBatch:
		return true, 0
	}
	wait := o.cfg.MaxWait - time.Since(o.queue[0].at)
	return wait <= 0, wait
}

// publish stores the next batch, however often it takes. Its error is that of ctx.
func (o *Outbox[T]) publish(ctx context.Context) error {
	if o.flight == nil && !o.seal(o.cfg.MaxBatch) {
		return ctx.Err()
	}
	wait := newBackoff(20*time.Millisecond, time.Second)
	for began := time.Now(); ; {
		connect := o.bus.nextConnect()
		_, err := o.bus.Publish(ctx, o.cfg.Subject, o.flight.data, WithMsgID(o.flight.id))
		switch {
		case err == nil:
			o.remove(o.flight.items, true)
			if failing := time.Since(began); failing > failAlarmAfter {
				o.cfg.Log.Info().Str("subject", o.cfg.Subject).Dur("failing_for", failing).Msg("publishing events works again")
			}
			o.flight = nil
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrTooLarge):
			// Refused for good and not stored: its number goes to a smaller batch.
			items := o.flight.items
			o.flight, o.n = nil, o.n-1
			if items == 1 {
				o.drop(1, err)
				return nil
			}
			if !o.seal(items / 2) {
				return nil
			}
			continue
		}
		if time.Since(began) > failAlarmAfter && o.failNag.due(alarmEvery) {
			s := o.Stats()
			o.cfg.Log.Error().Err(err).Str("subject", o.cfg.Subject).Int("queued", s.Queued).Dur("oldest", s.Oldest).
				Msg("cannot publish events; still trying")
		}
		if err := wait.sleep(ctx, connect); err != nil {
			return err
		}
	}
}

// seal encodes the head of the queue, at most limit items, as the batch in
// flight. False: nothing is left that can be sent now; a batch that cannot be encoded is lost.
func (o *Outbox[T]) seal(limit int) bool {
	batch := o.head(limit)
	for len(batch) > 0 {
		data, err := o.cfg.Encode(o.n+1, batch)
		switch {
		case err != nil:
			o.drop(len(batch), err)
			return false
		case len(data) <= o.cfg.MaxBytes:
			o.n++
			o.flight = &sealed{id: fmt.Sprintf("%s-%d", o.cfg.ID, o.n), data: data, items: len(batch)}
			return true
		case len(batch) == 1:
			o.drop(1, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, len(data), o.cfg.MaxBytes))
			return false
		}
		batch = batch[:len(batch)/2]
	}
	return false
}

func (o *Outbox[T]) head(limit int) []T {
	o.mu.Lock()
	defer o.mu.Unlock()
	batch := make([]T, min(limit, len(o.queue)))
	for i := range batch {
		batch[i] = o.queue[i].item
	}
	return batch
}

// remove takes items from the head of the queue, published or lost.
func (o *Outbox[T]) remove(items int, published bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	items = min(items, len(o.queue)) // fewer once Close has given up on them
	if published {
		o.published += uint64(items)
	} else {
		o.lost += uint64(items)
	}
	clear(o.queue[:items]) // the array outlives them
	if o.queue = o.queue[items:]; len(o.queue) == 0 {
		o.queue = nil
	}
}

// drop loses items at the head of the queue that can never be sent.
func (o *Outbox[T]) drop(items int, why error) {
	o.remove(items, false)
	o.alarmLoss(why.Error())
}

func (o *Outbox[T]) alarmLoss(why string) {
	if o.lossNag.due(alarmEvery) {
		o.cfg.Log.Error().Str("subject", o.cfg.Subject).Uint64("lost", o.Stats().Lost).Str("why", why).
			Msg("events are lost")
	}
}

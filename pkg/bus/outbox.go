package bus

import (
	"cmp"
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
	// Encode gives the message of batch n. It may run again for a batch that found no room.
	Encode func(n uint64, batch []T) ([]byte, error)
	// A batch is closed at MaxBatch items (default 256) or MaxWait after its first (default 10 ms).
	MaxBatch int
	MaxWait  time.Duration
	// MaxQueued bounds the items that wait in memory, those in flight included (default 100,000).
	MaxQueued int
	// MaxBytes bounds a message (default 768 KiB), as the server's bound does; a batch above it is halved.
	MaxBytes int
	// Spool is a directory that keeps closed batches until they are published, and over the end of the
	// process: whoever opens it next publishes them first. "": there is none. SpoolBytes bounds it
	// (default 256 MiB).
	Spool      string
	SpoolBytes int64
	Log        zerolog.Logger
}

// OutboxStats is a moment of an Outbox. Queued, Lost and Published count items.
type OutboxStats struct {
	// Queued wait or are in flight, in memory or in the spool; Oldest is the age of the first of them.
	Queued int
	Oldest time.Duration
	// Spooled is the size of those in the spool, in bytes; Full says that more find no room in it.
	Spooled int64
	Full    bool
	// Published are stored; Lost exceeded MaxQueued, could not be encoded or read back from the spool,
	// were refused as too large, or were left at Close without a spool.
	Published uint64
	Lost      uint64
}

// Outbox publishes items in batches, in order, so that each acknowledged batch
// is stored exactly once: one batch is in flight at a time, and it is repeated
// under the same id, with the same bytes, until the stream has acknowledged it.
// Batches are numbered from 1 without a gap, unless the stream refuses one as too large; n and ID let a
// reader recognise a repetition that came after the dedup window.
//
// With a spool a batch is on disk before it is sent, so an outbox whose process is killed loses what
// had not been closed: at most MaxWait and the time of a write.
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

	backlog backlog
	sealed  chan struct{} // holds a token when the backlog has become worth a look

	turn    chan struct{} // held by whoever publishes: Run, then Close
	closing chan struct{}
	n       uint64 // of the last batch sealed; guarded by turn
	lossNag nag
	failNag nag
}

type queued[T any] struct {
	item T
	at   time.Time
}

// How long publishing may fail before it is an alarm, and how often alarms repeat.
const (
	failAlarmAfter = time.Second
	alarmEvery     = 10 * time.Second
)

// NewOutbox gives an Outbox that publishes once Run runs. It fails where the spool can't be used.
func NewOutbox[T any](b *Bus, cfg OutboxConfig[T]) (*Outbox[T], error) {
	cfg.MaxBatch = cmp.Or(cfg.MaxBatch, 256)
	cfg.MaxWait = cmp.Or(cfg.MaxWait, 10*time.Millisecond)
	cfg.MaxQueued = cmp.Or(cfg.MaxQueued, 100_000)
	cfg.MaxBytes = cmp.Or(cfg.MaxBytes, 768<<10)
	cfg.SpoolBytes = cmp.Or(cfg.SpoolBytes, 256<<20)
	o := &Outbox[T]{
		bus:     b,
		cfg:     cfg,
		backlog: &single{},
		wake:    make(chan struct{}, 1),
		sealed:  make(chan struct{}, 1),
		turn:    make(chan struct{}, 1),
		closing: make(chan struct{}),
	}
	if cfg.Spool != "" {
		spool, err := openSpool(cfg.Spool, cfg.ID, cfg.Subject, cfg.SpoolBytes, cfg.Log)
		if err != nil {
			return nil, fmt.Errorf("outbox %s: %w", cfg.Subject, err)
		}
		o.backlog = spool
	}
	return o, nil
}

// Add queues an item. It never waits for the network or the disk; false says that the outbox is full or
// closed, and the item counted as lost.
func (o *Outbox[T]) Add(item T) bool {
	o.mu.Lock()
	if o.closed || len(o.queue)+o.backlog.inMemory() >= o.cfg.MaxQueued {
		o.lost++
		lost := o.lost
		o.mu.Unlock()
		o.alarmLoss(lost, "the outbox is full or closed")
		return false
	}
	o.queue = append(o.queue, queued[T]{item, time.Now()})
	look := len(o.queue) == 1 || len(o.queue)%o.cfg.MaxBatch == 0
	o.mu.Unlock()
	if look {
		nudge(o.wake)
	}
	return true
}

func nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Stats gives the state of this moment.
func (o *Outbox[T]) Stats() OutboxStats {
	b := o.backlog.stats()
	first, waits := o.backlog.head()
	o.mu.Lock()
	defer o.mu.Unlock()
	s := OutboxStats{
		Queued:    len(o.queue) + b.items,
		Spooled:   b.bytes,
		Full:      b.bytes >= o.cfg.SpoolBytes,
		Published: o.published,
		Lost:      o.lost + b.lost,
	}
	switch {
	case waits:
		s.Oldest = time.Since(first.at)
	case len(o.queue) > 0:
		s.Oldest = time.Since(o.queue[0].at)
	}
	return s
}

// Run publishes until ctx ends or Close is called, and returns nil. What is not published then is left to Close.
func (o *Outbox[T]) Run(ctx context.Context) error {
	o.turn <- struct{}{}
	defer func() { <-o.turn }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-o.closing:
			cancel()
		case <-ctx.Done():
		}
	})
	wg.Go(func() {
		for o.await(ctx) == nil {
			o.seal()
		}
	})
	for ctx.Err() == nil {
		if first, ok := o.backlog.head(); ok {
			o.publish(ctx, first)
			continue
		}
		select {
		case <-o.sealed:
		case <-ctx.Done():
		}
	}
	wg.Wait()
	return nil
}

// Close ends Run, publishes what is queued and waits for its acknowledgement.
// What is left when ctx ends is counted as lost, unless the spool has it, and the error says how much;
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
		defer func() { o.backlog.close(); <-o.turn }()
	case <-ctx.Done():
		return o.abandon(ctx.Err())
	}
	for o.Stats().Queued > 0 {
		for o.backlog.room() && o.seal() {
		}
		first, ok := o.backlog.head()
		if !ok {
			continue // what was queued could not be encoded
		}
		if err := o.publish(ctx, first); err != nil {
			return o.abandon(err)
		}
	}
	return nil
}

// abandon gives up what is queued and not spooled.
func (o *Outbox[T]) abandon(cause error) error {
	gone := o.backlog.inMemory()
	spooled := o.backlog.stats().items - gone
	o.mu.Lock()
	gone += len(o.queue)
	o.queue = nil
	o.lost += uint64(gone)
	o.mu.Unlock()
	return fmt.Errorf("outbox %s: closed with %d items unpublished, %d of them kept in the spool: %w", o.cfg.Subject, gone+spooled, spooled, cause)
}

// await returns when a batch is due and has room. Its error is that of ctx.
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
	room := o.backlog.room()
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case len(o.queue) == 0:
		return false, 0
	case !room:
		return false, retryWrite
	case len(o.queue) >= o.cfg.MaxBatch:
		return true, 0
	}
	wait := o.cfg.MaxWait - time.Since(o.queue[0].at)
	return wait <= 0, wait
}

// publish stores a batch, the first of the backlog, however often it takes. Its error is that of ctx.
func (o *Outbox[T]) publish(ctx context.Context, r record) error {
	wait := newBackoff(20*time.Millisecond, time.Second)
	for began := time.Now(); ; {
		connect := o.bus.nextConnect()
		_, err := o.bus.Publish(ctx, r.subject, r.data, WithMsgID(r.msgID()))
		switch {
		case err == nil:
			o.done(r, true)
			if failing := time.Since(began); failing > failAlarmAfter {
				o.cfg.Log.Info().Str("subject", r.subject).Dur("failing_for", failing).Msg("publishing events works again")
			}
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrTooLarge): // refused for good and not stored
			o.alarmLoss(o.done(r, false), err.Error())
			return nil
		}
		if time.Since(began) > failAlarmAfter && o.failNag.due(alarmEvery) {
			s := o.Stats()
			o.cfg.Log.Error().Err(err).Str("subject", r.subject).Int("queued", s.Queued).Int64("spooled_bytes", s.Spooled).
				Bool("spool_full", s.Full).Dur("oldest", s.Oldest).Msg("cannot publish events; still trying")
		}
		if err := wait.sleep(ctx, connect); err != nil {
			return err
		}
	}
}

// done takes the first batch off the backlog, and says how many items are lost by now.
func (o *Outbox[T]) done(r record, published bool) (lost uint64) {
	o.mu.Lock()
	if published {
		o.published += uint64(r.items)
	} else {
		o.lost += uint64(r.items)
	}
	lost = o.lost
	o.mu.Unlock()
	o.backlog.pop()
	nudge(o.wake)
	return lost
}

// maxHeader is what a message needs besides its data, at the most, in bytes.
const maxHeader = 512

// seal closes the head of the queue as the next batch of the backlog. False: nothing is left to close, or
// the backlog has no room. A batch that can't be encoded is lost.
func (o *Outbox[T]) seal() bool {
	batch, most := o.head(o.cfg.MaxBatch), o.cfg.MaxBytes
	if payload := int(o.bus.conn.MaxPayload()); payload > 0 { // known once it was connected
		most = min(most, payload-maxHeader)
	}
	for len(batch) > 0 {
		data, err := o.cfg.Encode(o.n+1, batch)
		switch {
		case err != nil:
			o.drop(len(batch), err)
			return true
		case len(data) <= most:
			if !o.backlog.push(record{o.cfg.Subject, o.cfg.ID, o.n + 1, len(batch), time.Now(), data}) {
				return false
			}
			o.n++
			o.take(len(batch))
			nudge(o.sealed)
			return true
		case len(batch) == 1:
			o.drop(1, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, len(data), most))
			return true
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

// take removes items from the head of the queue.
func (o *Outbox[T]) take(items int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	items = min(items, len(o.queue)) // fewer once Close has given up on them
	clear(o.queue[:items])           // the array outlives them
	if o.queue = o.queue[items:]; len(o.queue) == 0 {
		o.queue = nil
	}
}

// drop loses items at the head of the queue that can never be sent.
func (o *Outbox[T]) drop(items int, why error) {
	o.take(items)
	o.mu.Lock()
	o.lost += uint64(items)
	lost := o.lost
	o.mu.Unlock()
	o.alarmLoss(lost, why.Error())
}

// alarmLoss never waits: requests are behind it.
func (o *Outbox[T]) alarmLoss(lost uint64, why string) {
	if o.lossNag.due(alarmEvery) {
		o.cfg.Log.Error().Str("subject", o.cfg.Subject).Uint64("lost", lost).Str("why", why).Msg("events are lost")
	}
}

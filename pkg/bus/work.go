package bus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// workPoll bounds one wait for a job.
const workPoll = 10 * time.Second

// WorkConfig says which jobs to take.
type WorkConfig struct {
	// Stream is a work queue. All callers with the same Consumer share its jobs.
	Stream, Consumer string
	// AtOnce bounds the jobs under way here.
	AtOnce int
	// Life is how long a job may go without a word before somebody else gets it.
	Life time.Duration
}

// Job is a message of a work queue. Whoever has it says Done or Later within WorkConfig.Life, or Busy to have longer.
type Job struct {
	Message
	// Deliveries counts this one too.
	Deliveries uint64
	msg        jetstream.Msg
}

// Done removes the job from the queue. It may come again where the word is lost.
func (j Job) Done() error { return j.said(j.msg.Ack()) }

// Later gives the job back, for somebody to get it after d.
func (j Job) Later(d time.Duration) error { return j.said(j.msg.NakWithDelay(d)) }

// Busy keeps the job for another WorkConfig.Life.
func (j Job) Busy() error { return j.said(j.msg.InProgress()) }

func (j Job) said(err error) error {
	if err != nil {
		return fmt.Errorf("job %d: %w: %w", j.Seq, ErrUnavailable, err)
	}
	return nil
}

// Work hands the jobs of a work queue to fn, one at a time in the order of the queue, and runs what fn returns,
// many at once. A job is with one caller, until that one falls silent. Work goes on over reconnects, server
// restarts and while the stream is missing, and returns when ctx has ended and everything has run.
func (b *Bus) Work(ctx context.Context, cfg WorkConfig, fn func(Job) (do func())) {
	var running sync.WaitGroup
	defer running.Wait()
	slots := make(chan struct{}, cfg.AtOnce)
	var complain nag
	wait := newBackoff(50*time.Millisecond, 2*time.Second)
	for {
		connect := b.nextConnect()
		err := b.workSession(ctx, cfg, slots, func(j Job) {
			wait.reset()
			do := fn(j)
			running.Go(func() {
				defer func() { <-slots }()
				do()
			})
		})
		if ctx.Err() != nil {
			return
		}
		if b.Connected() && complain.due(10*time.Second) {
			b.log.Warn().Err(err).Str("stream", cfg.Stream).Msg("cannot take jobs from the stream; still trying")
		}
		if wait.sleep(ctx, connect) != nil {
			return
		}
	}
}

// workSession takes jobs, each into one of slots, until that fails.
func (b *Bus) workSession(ctx context.Context, cfg WorkConfig, slots chan struct{}, start func(Job)) error {
	ctx, stop := b.calls.begin(ctx, apiOf(cfg.Stream))
	defer stop()
	if !b.Connected() {
		return fmt.Errorf("%w: not connected", ErrUnavailable)
	}
	bound, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	cons, err := b.js.CreateOrUpdateConsumer(bound, cfg.Stream, jetstream.ConsumerConfig{
		Durable:       cfg.Consumer,
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       cfg.Life,
		MaxDeliver:    -1,
		MaxAckPending: -1, // jobs that wait for later hold up no others
	})
	if err != nil {
		return classify(bound, err)
	}
	for {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return classify(ctx, ctx.Err())
		}
		j, err := nextJob(ctx, cons)
		if err != nil {
			<-slots
			if errors.Is(err, nats.ErrTimeout) || errors.Is(err, jetstream.ErrNoMessages) || errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
				continue
			}
			return classify(ctx, err)
		}
		start(j)
	}
}

func nextJob(ctx context.Context, cons jetstream.Consumer) (Job, error) {
	bound, cancel := context.WithTimeout(ctx, workPoll)
	defer cancel()
	m, err := cons.Next(jetstream.FetchContext(bound), jetstream.FetchHeartbeat(heartbeatEvery))
	if err != nil {
		return Job{}, err
	}
	meta, err := m.Metadata()
	if err != nil {
		return Job{}, err
	}
	return Job{
		Message: Message{
			Subject: m.Subject(), Data: m.Data(), Header: m.Headers(),
			Seq: meta.Sequence.Stream, Time: meta.Timestamp, Pending: meta.NumPending,
		},
		Deliveries: meta.NumDelivered,
		msg:        m,
	}, nil
}

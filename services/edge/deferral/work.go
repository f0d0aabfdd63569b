package deferral

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

const (
	// atOnce bounds the deferred requests under way on one edge.
	atOnce = 16
	// consumer is the name that all edges take requests by.
	consumer = "edge"
	// orphan is how long a request without a state may be one whose state is on its way.
	orphan = time.Minute
	// retry is the pause after something that should not have failed.
	retry = time.Second
	// finishing bounds how long an answer is tried to be stored.
	finishing = 30 * time.Second
)

// Prospect is when a request may run.
type Prospect struct {
	// Wait is how long its limits need until they have room for it; 0: it may run now. Each is how long for every next one.
	Wait, Each time.Duration
}

// ErrInterrupted: the edge stopped before the request was answered.
var ErrInterrupted = errors.New("deferral: interrupted")

// Runner runs requests as their clients would.
type Runner interface {
	// Foresee tells when the request of a client may run; an error says that it never will.
	Foresee(ctx context.Context, client string, r Request) (Prospect, error)
	// Run admits and runs a request. Where it is not admitted, again is how long to wait. Its error is ErrInterrupted, or
	// says why it never will be answered.
	Run(ctx context.Context, client string, r Request) (a Answer, again time.Duration, err error)
}

// Run runs requests when it is their turn, until ctx ends. Those under way then have the time drain to finish.
func (q *Queue) Run(ctx context.Context, r Runner, drain time.Duration) {
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(drain, cancel) })()
	w := worker{Queue: q, runner: r, ctx: running}
	q.bus.Work(ctx, bus.WorkConfig{Stream: events.StreamDeferred, Consumer: consumer, AtOnce: atOnce, Life: q.life}, w.take)
}

type worker struct {
	*Queue
	runner Runner
	ctx    context.Context
}

// take puts one message of the queue in its client's line, and gives what there is to do about it.
func (w worker) take(j bus.Job) func() {
	m, err := events.Decode[events.Deferred](j.Data)
	if err != nil {
		w.log.Error().Err(err).Uint64("seq", j.Seq).Msg("a deferred request can't be read; it is dropped")
		return func() { w.tell(j, 0, nil) }
	}
	w.line.arrive(m.Client, j.Seq, time.Now())
	return func() {
		again, err := w.attempt(j, m)
		if again == 0 && err == nil {
			w.line.done(m.Client, j.Seq)
		}
		w.tell(j, again, err)
	}
}

// tell says what becomes of j.
func (w worker) tell(j bus.Job, again time.Duration, err error) {
	switch {
	case err != nil:
		w.log.Warn().Err(err).Uint64("seq", j.Seq).Msg("a deferred request waits")
		err = j.Later(max(again, retry))
	case again > 0:
		err = j.Later(again)
	default:
		err = j.Done()
	}
	if err != nil { // it comes again by itself
		w.log.Debug().Err(err).Uint64("seq", j.Seq).Msg("the queue was not told")
	}
}

// attempt runs the request of j if it is its turn, and otherwise gives how long to wait; with an error, for something
// unforeseen. Without either the message is done with.
func (w worker) attempt(j bus.Job, m events.Deferred) (again time.Duration, _ error) {
	ctx, cancel := context.WithTimeout(w.ctx, callTimeout)
	defer cancel()
	d, at, err := w.load(ctx, m.ID)
	switch {
	case errors.Is(err, ErrNotFound):
		w.line.done(m.Client, j.Seq) // it holds up nobody
		if time.Since(j.Time) < orphan {
			return retry, nil
		}
		return 0, nil // nobody was promised anything, or it is too late
	case err != nil:
		return 0, err
	case d.Seq != j.Seq: // a key that came twice at once: the other message counts
		return 0, nil
	case d.State == events.DeferralRunning && d.Once:
		return 0, w.fail(d, at, "the edge that ran it was lost: it may have run")
	case d.State != events.DeferralQueued && d.State != events.DeferralRunning:
		return 0, nil
	}
	if wait := w.line.turn(d.Client, d.Seq, time.Now()); wait > 0 {
		return wait, nil
	}
	var r Request
	if err := w.seal.open(m.Request, m.Sealed, "request "+m.ID, &r); err != nil {
		return 0, err // by an edge that knows the secret
	}
	p, err := w.runner.Foresee(ctx, d.Client, r)
	switch {
	case err != nil:
		return 0, w.fail(d, at, err.Error())
	case p.Wait > 0:
		if time.Since(j.Time)+p.Wait > events.DeferralLife {
			return 0, w.fail(d, at, "its limits have no room for it in time")
		}
		return w.line.later(d.Client, d.Seq, p.Wait, p.Each, time.Now()), nil
	}
	d.State = events.DeferralRunning
	if at, err = w.save(ctx, d, at); err != nil {
		if errors.Is(err, bus.ErrConflict) { // cancelled; the next look will tell
			return leastStep, nil
		}
		return 0, err
	}
	return w.run(j, d, at, r, p.Each)
}

// run runs a request that is marked running, and stores what comes of it.
func (w worker) run(j bus.Job, d events.Deferral, at uint64, r Request, each time.Duration) (again time.Duration, _ error) {
	alive := time.NewTicker(w.life / 3)
	over := make(chan struct{})
	go func() {
		defer alive.Stop()
		for {
			select {
			case <-over:
				return
			case now := <-alive.C:
				w.line.busy(d.Client, d.Seq, now)
				if err := j.Busy(); err != nil {
					w.log.Debug().Err(err).Msg("the queue was not told")
				}
			}
		}
	}()
	defer close(over)

	a, again, err := w.runner.Run(w.ctx, d.Client, r)
	switch {
	case errors.Is(err, ErrInterrupted) && d.Once:
		return 0, w.fail(d, at, "the edge that ran it stopped: it may have run")
	case errors.Is(err, ErrInterrupted), err == nil && again > 0:
		d.State = events.DeferralQueued
		if err := w.finish(d, at); err != nil {
			return 0, err
		}
		return w.line.later(d.Client, d.Seq, again, each, time.Now()), nil
	case err != nil:
		return 0, w.fail(d, at, err.Error())
	}
	d.State = events.DeferralDone
	if d.Result, d.Sealed, err = w.seal.seal(a, "answer "+d.ID); err != nil {
		return 0, w.fail(d, at, err.Error())
	}
	err = w.finish(d, at)
	if errors.Is(err, ErrFull) {
		return 0, w.fail(d, at, fmt.Sprintf("it ran and was answered %d, but the answer could not be kept", a.Status))
	}
	return 0, err
}

func (w worker) fail(d events.Deferral, at uint64, reason string) error {
	d.State, d.Reason, d.Result, d.Sealed = events.DeferralFailed, reason, nil, false
	return w.finish(d, at)
}

// finish stores the last word on a request, also where NATS is away for a while. Another's word that came in between
// gives way to it, unless that is an answer.
func (w worker) finish(d events.Deferral, at uint64) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.ctx), finishing)
	defer cancel()
	for {
		_, err := w.save(ctx, d, at)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, bus.ErrConflict):
			now, seq, err := w.load(ctx, d.ID)
			if errors.Is(err, ErrNotFound) || err == nil && (now.State == events.DeferralDone || d.State == events.DeferralQueued) {
				return nil
			}
			if err == nil {
				at = seq
				continue
			}
		case errors.Is(err, bus.ErrFull), errors.Is(err, bus.ErrTooLarge):
			return classify(err)
		}
		select {
		case <-ctx.Done():
			return classify(err)
		case <-time.After(leastStep):
		}
	}
}

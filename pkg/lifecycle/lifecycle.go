package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// DefaultStop bounds the stop of a component that names no bound.
const DefaultStop = 10 * time.Second

// Component is a part of a program.
type Component struct {
	Name string
	// Run works until ctx ends, then cleans up and returns. An error ends the
	// program; nil before ctx ends says that its work is done.
	Run func(ctx context.Context) error
	// Ready, if set, returns once the next component may start.
	Ready func(ctx context.Context) error
	// Stop bounds the time from the end of Run's context to its return; default DefaultStop.
	Stop time.Duration
}

// running is a started component. err is what Run returned, once done is closed.
type running struct {
	Component
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// Run starts the components in order, and waits until ctx ends or one fails.
// Then it stops those that run, the last started first, each before the next.
// Its error joins the failure and whatever went wrong while stopping; it is nil
// when ctx ended and everything stopped as it should.
func Run(ctx context.Context, components ...Component) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)

	var started []*running
	for _, c := range components {
		r := start(ctx, c, end)
		started = append(started, r)
		if c.Ready == nil {
			continue
		}
		if err := c.Ready(ctx); err != nil {
			if ctx.Err() == nil {
				end(fmt.Errorf("%s: not ready: %w", c.Name, err))
			}
			break
		}
	}
	<-ctx.Done()

	var errs []error
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) && !errors.Is(cause, context.DeadlineExceeded) {
		errs = append(errs, cause)
	}
	for i := len(started) - 1; i >= 0; i-- {
		errs = append(errs, started[i].stop())
	}
	return errors.Join(errs...)
}

// failure is the error of a component that ended the program.
type failure struct {
	name string
	err  error
}

func (f *failure) Error() string { return f.name + ": " + f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// start runs c; its context ends only when it is stopped. end is told of a failure.
func start(ctx context.Context, c Component, end context.CancelCauseFunc) *running {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r := &running{Component: c, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		err := c.Run(own)
		if own.Err() != nil {
			if !errors.Is(err, context.Canceled) {
				r.err = err
			}
			return
		}
		if err != nil {
			end(&failure{c.Name, err})
		}
	}()
	return r
}

func (r *running) stop() error {
	bound := r.Stop
	if bound == 0 {
		bound = DefaultStop
	}
	r.cancel()
	t := time.NewTimer(bound)
	defer t.Stop()
	select {
	case <-r.done:
		if r.err != nil {
			return fmt.Errorf("%s: stopping: %w", r.Name, r.err)
		}
		return nil
	case <-t.C:
		return fmt.Errorf("%s: did not stop within %s", r.Name, bound)
	}
}

package lifecycle_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aegisrate/aegisrate/pkg/lifecycle"
)

// diary records what happened, in order.
type diary struct {
	mu    sync.Mutex
	lines []string
}

func (d *diary) add(line string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lines = append(d.lines, line)
}

func (d *diary) component(name string) lifecycle.Component {
	return lifecycle.Component{
		Name: name,
		Run: func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(time.Second) // cleaning up
			d.add("stop " + name)
			return ctx.Err()
		},
		Ready: func(context.Context) error {
			time.Sleep(time.Second)
			d.add("ready " + name)
			return nil
		},
	}
}

func (d *diary) want(t *testing.T, want ...string) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.Equal(d.lines, want) {
		t.Errorf("got  %q\nwant %q", d.lines, want)
	}
}

func TestOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d diary
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := lifecycle.Run(ctx, d.component("a"), d.component("b"), d.component("c")); err != nil {
			t.Errorf("a program that was asked to end failed: %v", err)
		}
		d.want(t, "ready a", "ready b", "ready c", "stop c", "stop b", "stop a")
	})
}

func TestFailureStopsTheOthersInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d diary
		boom := errors.New("boom")
		failing := lifecycle.Component{Name: "failing", Run: func(context.Context) error {
			time.Sleep(10 * time.Second)
			return boom
		}}
		err := lifecycle.Run(t.Context(), d.component("a"), failing, d.component("b"))
		if !errors.Is(err, boom) || !strings.Contains(err.Error(), "failing: boom") {
			t.Errorf("got %v, want the failure under its component's name", err)
		}
		d.want(t, "ready a", "ready b", "stop b", "stop a")
	})
}

func TestDoneIsNoFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d diary
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		done := lifecycle.Component{Name: "done", Run: func(context.Context) error { return nil }}
		if err := lifecycle.Run(ctx, done, d.component("a")); err != nil {
			t.Error(err)
		}
		d.want(t, "ready a", "stop a")
	})
}

func TestFailureWhileAnotherIsStarting(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d diary
		boom := errors.New("boom")
		first := lifecycle.Component{Name: "first", Run: func(context.Context) error { return boom }}
		second := lifecycle.Component{
			Name: "second",
			Run:  func(ctx context.Context) error { <-ctx.Done(); return nil },
			Ready: func(ctx context.Context) error { // never, were it not for the failure
				<-ctx.Done()
				return ctx.Err()
			},
		}
		if err := lifecycle.Run(t.Context(), first, second, d.component("third")); !errors.Is(err, boom) {
			t.Errorf("got %v, want boom", err)
		}
		d.want(t)
	})
}

func TestNotReady(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d diary
		c := d.component("b")
		c.Ready = func(context.Context) error { return errors.New("port taken") }
		err := lifecycle.Run(t.Context(), d.component("a"), c, d.component("c"))
		if err == nil || err.Error() != "b: not ready: port taken" {
			t.Errorf("got %v", err)
		}
		d.want(t, "ready a", "stop b", "stop a")
	})
}

func TestStopIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d diary
		release := make(chan struct{})
		defer close(release)
		stuck := lifecycle.Component{
			Name: "stuck",
			Run:  func(context.Context) error { <-release; return nil },
			Stop: 3 * time.Second,
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		began := time.Now()
		err := lifecycle.Run(ctx, d.component("a"), stuck)
		if err == nil || err.Error() != "stuck: did not stop within 3s" {
			t.Errorf("got %v", err)
		}
		if took := time.Since(began); took != 14*time.Second { // 10 until ctx ends, 3 for stuck, 1 for a
			t.Errorf("took %v", took)
		}
		d.want(t, "ready a", "stop a")
	})
}

func TestErrorWhileStopping(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		lost := errors.New("3 items unpublished")
		c := lifecycle.Component{Name: "outbox", Run: func(ctx context.Context) error { <-ctx.Done(); return lost }}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := lifecycle.Run(ctx, c); !errors.Is(err, lost) {
			t.Errorf("got %v, want what went wrong while stopping", err)
		}
	})
}

package admission_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// Each scenario feeds the breaker: p and P are a bad and a good ping, d and D a failed and an
// answered debit. After each step stands the state: c closed, h half-open, o open.
func TestBreakerScenarios(t *testing.T) {
	t.Parallel()
	for name, scenario := range map[string]string{
		"three bad pings":                 "pc pc po",
		"two bad pings are nothing":       "pc pc Pc pc pc Pc",
		"three failed debits":             "dc dc do",
		"an answer between":               "dc dc Dc dc dc do",
		"pings do not excuse debits":      "dc Pc dc Pc do",
		"debits do not excuse pings":      "pc Dc pc Dc po",
		"recovers by pings":               "pc pc po Po Po Ph Dc",
		"pings must be in a row":          "pc pc po Po Po po Po Po Ph",
		"a failed debit reopens":          "dc dc do Po Po Ph do Po Po Ph Dc dc dc do",
		"bad pings reopen a half-open":    "dc dc do Po Po Ph ph ph po",
		"late results change nothing":     "dc dc do do Do do Po Po Ph Dc",
		"half-open stays without traffic": "dc dc do Po Po Ph Ph Ph Ph",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := admission.NewBreaker(nil)
			for i, step := range strings.Fields(scenario) {
				switch step[0] {
				case 'p', 'P':
					b.Ping(step[0] == 'P')
				case 'd', 'D':
					b.Debit(step[0] == 'D')
				}
				if got := b.State().String()[0]; got != step[1] {
					t.Fatalf("step %d (%s): state %c", i+1, step, got)
				}
			}
		})
	}
}

func TestBreakerTellsItsChanges(t *testing.T) {
	t.Parallel()
	var got []admission.BreakerState
	b := admission.NewBreaker(func(s admission.BreakerState) { got = append(got, s) })
	for range 5 {
		b.Ping(false)
	}
	for range 5 {
		b.Ping(true)
	}
	b.Debit(true)
	if want := []admission.BreakerState{admission.Open, admission.HalfOpen, admission.Closed}; !slices.Equal(got, want) {
		t.Errorf("changes %v, want %v", got, want)
	}
}

// sample runs the breaker on ping until end is called.
func sample(t *testing.T, b *admission.Breaker, ping func(context.Context) error) (end func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); b.Run(ctx, ping) }()
	return func() { cancel(); <-done }
}

// Pings that fail at once, that hang and that are slow all open the breaker in bounded time.
func TestBreakerRun(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		ping   func(context.Context) error
		within time.Duration
	}{
		"refused": {func(context.Context) error { return errors.New("refused") }, 300 * time.Millisecond},
		"hanging": {func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, 800 * time.Millisecond},
		"slow":    {func(context.Context) error { time.Sleep(201 * time.Millisecond); return nil }, 800 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				opened := make(chan time.Duration, 1)
				b := admission.NewBreaker(func(s admission.BreakerState) {
					if s == admission.Open {
						opened <- time.Since(began)
					}
				})
				defer sample(t, b, test.ping)()
				if took := <-opened; took > test.within {
					t.Errorf("open after %v, want at most %v", took, test.within)
				}
			})
		})
	}
	t.Run("recovery", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			var down atomic.Bool
			down.Store(true)
			opened, usable := make(chan struct{}), make(chan time.Time, 1)
			b := admission.NewBreaker(func(s admission.BreakerState) {
				switch s {
				case admission.Open:
					close(opened)
				case admission.HalfOpen:
					usable <- time.Now()
				}
			})
			defer sample(t, b, func(ctx context.Context) error {
				if down.Load() {
					<-ctx.Done()
				}
				return ctx.Err()
			})()
			<-opened
			back := time.Now()
			down.Store(false)
			if took := (<-usable).Sub(back); took > time.Second {
				t.Errorf("requests ask the store again %v after it is back", took)
			}
		})
	})
	t.Run("good", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			b := admission.NewBreaker(nil)
			defer sample(t, b, func(context.Context) error { time.Sleep(150 * time.Millisecond); return nil })()
			time.Sleep(time.Minute)
			if b.State() != admission.Closed {
				t.Errorf("pings of 150 ms left the breaker %v", b.State())
			}
		})
	})
}

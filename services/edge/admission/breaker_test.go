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

// Each scenario feeds the breaker: p and P are a bad and a good ping, d and D a request that asks the store, if it may,
// and gets no answer or one; t begins a request and f and F end it; w waits a quarter of a second, W twelve. After each step stands
// the state: c closed, h half-open, o open; a ! before it says that the request was not let.
func TestBreakerScenarios(t *testing.T) {
	t.Parallel()
	for name, scenario := range map[string]string{
		"three bad pings":                 "pc pc po",
		"two bad pings are nothing":       "pc pc Pc pc pc Pc",
		"three failed debits":             "dc dc do d!o",
		"an answer between":               "dc dc Dc dc dc do",
		"pings do not excuse debits":      "dc Pc dc Pc do",
		"debits do not excuse pings":      "pc Dc pc Dc po",
		"recovers by three requests":      "pc pc po Po Po Ph Dh Dh Dc",
		"pings must be in a row":          "pc pc po Po Po po Po Po Ph",
		"a failed trial reopens":          "pc pc po Po Po Ph do D!o",
		"one trial at a time":             "pc pc po Po Po Ph th D!h D!h Fh Dh Dc",
		"trials must be in a row":         "pc pc po Po Po Ph Dh Dh do",
		"bad pings reopen a half-open":    "pc pc po Po Po Ph ph ph po",
		"and end its trial":               "pc pc po Po Po Ph th ph ph po Po Po Ph fh Dh Dh Dc",
		"late results change nothing":     "tc dc dc do fo wo Po Po Ph",
		"half-open stays without traffic": "pc pc po Po Po Ph Ph Ph Ph",
		"each failed trial doubles the wait": "pc pc po Po Po Ph do Po Po Po wo Ph " +
			"do Po Po Po wo Po wo Ph do Po Po Po wo Po wo Po wo Po wo Ph Dh Dh Dc",
		"what fails again soon waits longer": "pc pc po Po Po Ph Dh Dh Dc dc dc do Po Po Po wo Ph",
		"what was steady does not":           "pc pc po Po Po Ph do wo Po Po Ph Dh Dh Dc Wc dc dc do Po Po Ph",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			now := time.Unix(1000, 0)
			b := admission.NewBreaker(func() time.Time { return now }, nil)
			var begun admission.Pass
			for i, step := range strings.Fields(scenario) {
				pass := admission.Passed
				switch step[0] {
				case 'p', 'P':
					b.Ping(step[0] == 'P')
				case 'd', 'D':
					if pass = b.Pass(); pass != admission.Refused {
						b.Debit(pass, step[0] == 'D')
					}
				case 't':
					begun = b.Pass()
				case 'f', 'F':
					b.Debit(begun, step[0] == 'F')
				case 'w':
					now = now.Add(250 * time.Millisecond)
				case 'W':
					now = now.Add(12 * time.Second)
				}
				want := step[1:]
				if (want[0] == '!') != (pass == admission.Refused) {
					t.Fatalf("step %d (%s): pass %v", i+1, step, pass)
				}
				if got := b.State().String()[0]; got != want[len(want)-1] {
					t.Fatalf("step %d (%s): state %c", i+1, step, got)
				}
			}
		})
	}
}

func TestBreakerTellsItsChanges(t *testing.T) {
	t.Parallel()
	var got []admission.BreakerState
	b := admission.NewBreaker(time.Now, func(s admission.BreakerState) { got = append(got, s) })
	for range 5 {
		b.Ping(false)
	}
	for range 5 {
		b.Ping(true)
	}
	for range 5 {
		b.Debit(b.Pass(), true)
	}
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
				b := admission.NewBreaker(time.Now, func(s admission.BreakerState) {
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
			b := admission.NewBreaker(time.Now, func(s admission.BreakerState) {
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
	t.Run("too slow to be tried", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			b := admission.NewBreaker(time.Now, nil)
			for range 3 {
				b.Ping(false)
			}
			defer sample(t, b, func(context.Context) error { time.Sleep(100 * time.Millisecond); return nil })()
			time.Sleep(time.Minute)
			if b.State() != admission.Open {
				t.Errorf("pings of 100 ms, which no request waits for, left the breaker %v", b.State())
			}
		})
	})
	t.Run("good", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			b := admission.NewBreaker(time.Now, nil)
			defer sample(t, b, func(context.Context) error { time.Sleep(150 * time.Millisecond); return nil })()
			time.Sleep(time.Minute)
			if b.State() != admission.Closed {
				t.Errorf("pings of 150 ms left the breaker %v", b.State())
			}
		})
	})
}

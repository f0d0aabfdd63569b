package admission_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// beats runs seconds of a fleet in which our beat and the others' come back.
func beats(f *admission.Fleet, from time.Time, seconds int, others ...string) time.Time {
	for range seconds {
		from = from.Add(time.Second)
		f.Heard("us", false, from)
		for _, o := range others {
			f.Heard(o, false, from.Add(100*time.Millisecond))
		}
	}
	return from
}

func want(t *testing.T, f *admission.Fleet, what string, live int64) {
	t.Helper()
	if got := f.Live(); got != live {
		t.Errorf("%s: %d live, want %d", what, got, live)
	}
}

func TestFleet(t *testing.T) {
	t.Parallel()
	f := admission.NewFleet("us")
	now := time.Now()
	want(t, f, "alone", 1)
	now = beats(f, now, 5, "b", "c")
	want(t, f, "three", 3)
	now = beats(f, now, 3, "b")
	want(t, f, "c silent for three seconds", 3)
	now = beats(f, now, 1, "b")
	want(t, f, "c silent for longer", 2)
	f.Heard("b", true, now)
	want(t, f, "b left", 1)
	now = beats(f, now, 3, "b2")
	want(t, f, "b restarted", 2)
	beats(f, now, 100, "b2")
	want(t, f, "long after", 2)
}

// Without NATS no beat comes back, our own neither: the last count stands, and is not
// thrown away by the first beat after it.
func TestFleetKeepsItsCountThroughAnOutage(t *testing.T) {
	t.Parallel()
	f := admission.NewFleet("us")
	now := beats(f, time.Now(), 5, "b", "c")
	now = now.Add(10 * time.Minute)
	want(t, f, "during", 3)
	now = beats(f, now, 1) // ours comes back first
	want(t, f, "our first beat after", 3)
	now = beats(f, now, 1, "b", "c")
	want(t, f, "all back", 3)
	// Another outage; c does not survive it.
	now = now.Add(time.Minute)
	beats(f, now, 5, "b")
	want(t, f, "c is gone", 2)
	// Ours delivered late, many at once, prove no time to hear the others in.
	for range 50 {
		f.Heard("us", false, now.Add(6*time.Second))
	}
	want(t, f, "a burst of ours", 2)
}

func TestFleetIsBounded(t *testing.T) {
	t.Parallel()
	f := admission.NewFleet("us")
	now := time.Now()
	for i := range 100_000 {
		f.Heard(fmt.Sprint("forged", i), false, now)
	}
	if f.Live() > 5000 {
		t.Errorf("%d forged beats were kept", f.Live())
	}
}

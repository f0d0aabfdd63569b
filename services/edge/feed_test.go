package edge

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// What stands in the stream since a healthwatch that is dead pins nothing; what comes live
// counts, also where the clocks of NATS and the edge differ.
func TestHealthFeed(t *testing.T) {
	t.Parallel()
	f := healthFeed{
		multipliers: admission.NewMultipliers(time.Now),
		metrics:     &metrics{badHealth: prometheus.NewCounter(prometheus.CounterOpts{Name: "x"})},
		log:         zerolog.Nop(),
	}
	message := func(subject, upstream string, age time.Duration) bus.Message {
		data, err := events.Encode(events.Health{Upstream: upstream, Tick: 1, Multiplier: 500_000})
		if err != nil {
			t.Fatal(err)
		}
		return bus.Message{Subject: events.SubjectHealth(subject), Data: data, Time: time.Now().Add(-age)}
	}
	want := func(what, upstream string, m int64) {
		t.Helper()
		if got := f.multipliers.Get(upstream); got != m {
			t.Errorf("%s: %d, want %d", what, got, m)
		}
	}
	take := f.begin()
	take(message("a", "a", time.Hour))
	want("an old one that stood there", "a", bucket.One)
	take(message("a", "a", time.Hour))
	want("a new one by another clock", "a", 500_000)
	take(message("b", "b", time.Second))
	want("a fresh one that stood there", "b", 500_000)
	take(message("d", "c", 0))
	want("one under another's subject", "c", bucket.One)
	want("one under another's subject", "d", bucket.One)
}

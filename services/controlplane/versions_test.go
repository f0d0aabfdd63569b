package controlplane

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// What comes late or twice never sets the config back; a stream that lost its
// tail or was made anew does.
func TestVersionsMoveForwardOnly(t *testing.T) {
	t.Parallel()
	m, err := newMetrics(prometheus.NewRegistry(), func() float64 { return 0 })
	if err != nil {
		t.Fatal(err)
	}
	v := &versions{log: zerolog.Nop(), metrics: m}
	doc, err := policy.Encode(policy.Policy{})
	if err != nil {
		t.Fatal(err)
	}
	saw := func(stream string, seq uint64) uint64 {
		data, err := events.Encode(events.ConfigVersion{Version: seq, By: "x", Via: "http", Time: time.Unix(1, 0), Document: doc})
		if err != nil {
			t.Fatal(err)
		}
		v.saw(stream, bus.Message{Data: data, Seq: seq})
		return v.current().Version
	}
	for i, step := range []struct {
		do   func() uint64
		want uint64
	}{
		{func() uint64 { return saw("a", 4) }, 4},
		{func() uint64 { return saw("a", 5) }, 5},
		{func() uint64 { return saw("a", 4) }, 5},
		{func() uint64 { v.forget(); return v.current().Version }, 5},
		{func() uint64 { return saw("a", 3) }, 3},
		{func() uint64 { return saw("b", 1) }, 1},
		{func() uint64 { return saw("b", 2) }, 2},
	} {
		if got := step.do(); got != step.want {
			t.Errorf("step %d: version %d, want %d", i, got, step.want)
		}
	}
}

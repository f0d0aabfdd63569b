package settler

import (
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bus"
)

func TestHistory(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	h := history{retention: time.Hour}
	if h.firstBefore(0, now) != 0 || h.lastBefore(time.Minute, now) != 0 || h.waiting(0, now) != 0 {
		t.Error("an empty history knows something")
	}
	// 100 messages a second for two hours, of which the stream holds ten minutes.
	for s := range 2 * 3600 {
		now = now.Add(time.Second)
		last := uint64(s+1) * 100
		h.note(now, last-min(last-1, 60_000), last)
	}
	if n := len(h.samples); n < 360 || n > 362 {
		t.Errorf("%d samples for an hour at one in ten seconds", n)
	}
	const last = 720_000
	// The answers are of samples at most ten seconds further back.
	near := func(what string, got, want uint64) {
		t.Helper()
		if got > want || got+10*100 < want {
			t.Errorf("%s: %d, want %d or a little less", what, got, want)
		}
	}
	near("last ten minutes ago", h.lastBefore(10*time.Minute, now), last-60_000)
	near("first ten minutes ago", h.firstBefore(10*time.Minute, now), last-120_000)
	near("first an hour ago", h.firstBefore(time.Hour, now), last-420_000)
	if got := h.firstBefore(2*time.Hour, now); got != 0 {
		t.Errorf("first before anything was noted: %d, want 0", got)
	}
	if got := h.waiting(last-30_000, now); got < 290*time.Second || got > 5*time.Minute {
		t.Errorf("what came in the last five minutes has been waiting for %v", got)
	}
	if got := h.waiting(last, now); got != 0 {
		t.Errorf("nothing has been waiting for %v", got)
	}
}

func TestPurgeBelow(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	s := &Service{cfg: Config{PurgeMargin: 1000, PurgeAge: time.Hour}}
	s.history.retention = time.Hour
	s.history.note(now.Add(-time.Hour), 1, 5000) // 1 to 5000 are an hour old
	for _, c := range []struct {
		name  string
		state bus.StreamState
		low   uint64
		want  uint64
	}{
		{"old and settled, but for the margin", bus.StreamState{Last: 9000, Msgs: 9000}, 9000, 5001 - 1000},
		{"not settled", bus.StreamState{Last: 9000, Msgs: 9000}, 3000, 3001 - 1000},
		{"less than the margin", bus.StreamState{Last: 900, Msgs: 900}, 900, 0},
		{"half full: young ones too", bus.StreamState{Last: 9000, Msgs: 9000, Bytes: maxBytes/2 + 1}, 9000, 9001 - 1000},
		{"half full, of few messages: less of a margin", bus.StreamState{Last: 9000, Msgs: 400, Bytes: maxBytes}, 9000, 9001 - 100},
		{"half full, not settled", bus.StreamState{Last: 9000, Msgs: 9000, Bytes: maxBytes}, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := s.purgeBelow(c.state, c.low, now); got != c.want {
				t.Errorf("got %d, want %d", got, c.want)
			}
		})
	}
	young := &Service{cfg: Config{PurgeMargin: 0, PurgeAge: time.Hour}, history: history{retention: time.Hour}}
	young.history.note(now.Add(-time.Minute), 1, 5000)
	if got := young.purgeBelow(bus.StreamState{Last: 5000, Msgs: 5000}, 5000, now); got != 1 {
		t.Errorf("a settler that has just started purges below %d what may be young", got)
	}
	if maxBytes == 0 {
		t.Error("the bound of the stream is unknown")
	}
}

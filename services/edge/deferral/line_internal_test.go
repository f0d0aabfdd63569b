package deferral

import (
	"testing"
	"time"
)

func TestLine(t *testing.T) {
	t.Parallel()
	var l line
	turn := func(client string, seq uint64, now time.Time) time.Duration {
		l.arrive(client, seq, now)
		return l.turn(client, seq, now)
	}
	now := time.Unix(1000, 0)
	if w := turn("a", 10, now); w != 0 {
		t.Errorf("first: %v", w)
	}
	l.later("a", 10, 4*time.Second, time.Second, now)
	if w := turn("a", 11, now); w != 5*time.Second {
		t.Errorf("the second comes a second after the first: %v", w)
	}
	if w := turn("a", 12, now); w != 6*time.Second {
		t.Errorf("third: %v", w)
	}
	if w := turn("b", 13, now); w != 0 {
		t.Errorf("another client: %v", w)
	}
	if w := turn("a", 9, now); w != 0 {
		t.Errorf("an older one goes first: %v", w)
	}
	l.done("a", 9)
	now = now.Add(4 * time.Second)
	if w := turn("a", 10, now); w != 0 {
		t.Errorf("first, at its time: %v", w)
	}
	l.done("a", 10)
	now = now.Add(time.Second)
	if w := turn("a", 12, now); w == 0 {
		t.Error("third before the second")
	}
	// The second does not come back: another edge has it.
	now = now.Add(overdue + time.Second)
	if w := turn("a", 12, now); w != 0 {
		t.Errorf("third, the second being gone: %v", w)
	}
	l.busy("a", 12, now.Add(time.Minute)) // it takes its time
	if w := turn("a", 14, now.Add(time.Minute)); w == 0 {
		t.Error("fourth while the third runs")
	}
	l.later("a", 12, time.Hour, 0, now)
	if w := turn("a", 14, now); w > longest {
		t.Errorf("a wait of %v", w)
	}
	l.arrive("a", 20, now)
	if w := turn("a", 21, now); w == 0 {
		t.Error("who arrived first, and has not come to its turn, is overtaken")
	}
	for _, seq := range []uint64{12, 14, 20, 21} {
		l.done("a", seq)
	}
	l.done("b", 13)
	if len(l.clients) != 0 {
		t.Errorf("left in line: %v", l.clients)
	}
}

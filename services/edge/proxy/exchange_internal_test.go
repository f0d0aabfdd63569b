package proxy

import (
	"testing"
	"time"
)

// A client has the time for a part from the last one on, and no more than a body at the least rate leaves.
func TestTimeForABody(t *testing.T) {
	t.Parallel()
	const limit = 10 * time.Second
	for _, c := range []struct {
		since    time.Duration
		received int64
		want     time.Duration
	}{
		{0, 0, limit},
		{0, 1 << 30, limit}, // what came fast buys no longer pause
		{4 * time.Second, 0, 6 * time.Second},
		{15 * time.Second, 10 * minBodyRate, 5 * time.Second},
		{15 * time.Second, 15 * minBodyRate, limit},
		{21 * time.Second, 10 * minBodyRate, -time.Second},
	} {
		b := &requestBody{client: &patience{limit: limit}, begun: time.Now().Add(-c.since), received: c.received}
		if got := b.allowed(); got > c.want || got < c.want-3*time.Second {
			t.Errorf("%v after the begin, with %d bytes: %v, want %v", c.since, c.received, got, c.want)
		}
	}
}

package healthwatch

import "time"

// logClock tells the time of the server that stamps the messages of the event
// log, from the last message that was seen as it was stored. It is late by no
// more than that message's way here.
type logClock struct {
	// mono is a monotonic clock with an origin of its own.
	mono func() time.Duration
	// offset is Unix microseconds at mono's origin; 0: nothing was seen yet.
	offset int64
}

// observe sets the clock by a message that was stored just now.
func (c *logClock) observe(stored time.Time) {
	c.offset = stored.UnixMicro() - c.mono().Microseconds()
}

// now is in Unix microseconds; false before anything was observed.
func (c *logClock) now() (int64, bool) {
	return c.offset + c.mono().Microseconds(), c.offset != 0
}

//go:build race

package stack

import "time"

// soon is how long a change or a settlement may take; the race detector slows everything down by a factor of ten.
const soon = 10 * time.Second

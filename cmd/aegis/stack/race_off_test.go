//go:build !race

package stack

import "time"

// soon is how long a change or a settlement may take.
const soon = time.Second

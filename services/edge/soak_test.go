//go:build soak

package edge_test

import "testing"

// Slow-loris, as large as a file limit of 20,000 lets one process play both sides.
func TestSlowLoris5000(t *testing.T) { slowLoris(t, 5000) }

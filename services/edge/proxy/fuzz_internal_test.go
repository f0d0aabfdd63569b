package proxy

import (
	"net/http"
	"strconv"
	"strings"
	"testing"
)

// Whatever an upstream says of the cost: what is kept is bounded, is its own words where it
// said one thing, and never a number where it said more than one or was cut.
func FuzzComputeCost(f *testing.F) {
	for _, seed := range [][2]string{{"1.5", ""}, {"", "5"}, {"1", "2"}, {"NaN", "1e309"}, {strings.Repeat("9", 70), ""}, {strings.Repeat("0", 63), "1"}} {
		f.Add(seed[0], seed[1], seed[1] != "")
	}
	f.Fuzz(func(t *testing.T, first, second string, both bool) {
		h := http.Header{headerComputeCost: {first}}
		if both {
			h.Add(headerComputeCost, second)
		}
		got := computeCost(h)
		if len(got) > maxComputeCost {
			t.Fatalf("%d bytes are kept", len(got))
		}
		if !both && len(first) <= maxComputeCost && got != first {
			t.Fatalf("%q became %q", first, got)
		}
		if _, err := strconv.ParseFloat(got, 64); both && len(first) < maxComputeCost && err == nil {
			t.Fatalf("%q and %q became the number %q", first, second, got)
		}
	})
}

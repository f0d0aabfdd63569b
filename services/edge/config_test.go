package edge

import (
	"strings"
	"testing"
)

func TestIDOf(t *testing.T) {
	t.Parallel()
	for host, want := range map[string]string{
		"edge-1": "edge-1", "Web.Example.COM": "web-example-com", "-x-": "x", "": "", "ü": "", strings.Repeat("a", 99): strings.Repeat("a", 63),
	} {
		if got := idOf(host); got != want {
			t.Errorf("%q: %q, want %q", host, got, want)
		}
	}
}

package main

import (
	"net/netip"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/services/edge"
)

// The flags' defaults, which --help shows, are those that the package documents.
func TestDefaults(t *testing.T) {
	t.Parallel()
	c := newCommands()
	p, err := kong.New(c, kong.Name("edge"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Parse([]string{"--id", "e", "--data-dir", "data/edge", "--trusted-proxies", "10.0.0.0/8,fd00::/8"}); err != nil {
		t.Fatal(err)
	}
	want := edge.DefaultConfig()
	want.ID = "e"
	want.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
	got := c.Run.Edge
	got.DataDir = want.DataDir // kong makes paths absolute
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("defaults (-documented +flags):\n%s", diff)
	}
}

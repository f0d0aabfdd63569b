package admission_test

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// headers makes a header of pairs of name and value.
func headers(pairs ...string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Add(pairs[i], pairs[i+1])
	}
	return h
}

// Case 25: one bucket for each verified client, whatever the spelling; unknown keys gain none.
func TestIdentifyByKey(t *testing.T) {
	t.Parallel()
	table := compile(t, doc(`  r: {path: /, upstream: up}`))
	for _, test := range []struct {
		name   string
		header http.Header
		want   string
	}{
		{"no key", headers(), "ip:192.0.2.1"},
		{"x-api-key", headers("X-API-Key", "alice"), "user:alice"},
		{"x-api-key with spaces", headers("X-API-Key", " \talice "), "user:alice"},
		{"bearer", headers("Authorization", "Bearer alice"), "user:alice"},
		{"bearer in lower case with spaces", headers("Authorization", "bearer  alice "), "user:alice"},
		{"bearer with a tab", headers("Authorization", "BEARER\talice"), "user:alice"},
		{"bearer without a space", headers("Authorization", "Beareralice"), "ip:192.0.2.1"},
		{"bearer without a token", headers("Authorization", "Bearer "), "ip:192.0.2.1"},
		{"another scheme", headers("Authorization", "Basic alice"), "ip:192.0.2.1"},
		{"key in another case", headers("X-API-Key", "Alice"), "ip:192.0.2.1"},
		{"bearer inside x-api-key", headers("X-API-Key", "Bearer alice"), "ip:192.0.2.1"},
		{"unknown key", headers("X-API-Key", "nobody"), "ip:192.0.2.1"},
		{"empty key", headers("X-API-Key", ""), "ip:192.0.2.1"},
		{"both, x-api-key first", headers("Authorization", "Bearer alice", "X-API-Key", "bob"), "user:bob"},
		{"both, only the bearer verifies", headers("Authorization", "Bearer alice", "X-API-Key", "nobody"), "user:alice"},
		{"two lines, the second verifies", headers("X-API-Key", "nobody", "X-API-Key", "bob"), "user:bob"},
		{"the digest is no key", headers("X-API-Key", "2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90"), "ip:192.0.2.1"},
		{"a known key after too many others", headers("X-API-Key", "1", "X-API-Key", "2", "X-API-Key", "3", "X-API-Key", "4", "X-API-Key", "bob"), "ip:192.0.2.1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			got := admission.Identifier{IPv6Bits: 64}.Identify(admission.Request{Header: test.header, Peer: netip.MustParseAddr("192.0.2.1")}, table)
			if got.ID != test.want || got.Known != strings.HasPrefix(test.want, "user:") {
				t.Errorf("got %q, known %t; want %q", got.ID, got.Known, test.want)
			}
		})
	}
	for i := range 1000 { // rotating unknown keys
		got := admission.Identifier{IPv6Bits: 64}.Identify(admission.Request{Header: headers("X-API-Key", fmt.Sprint("k", i)), Peer: netip.MustParseAddr("192.0.2.1")}, table)
		if got.ID != "ip:192.0.2.1" {
			t.Fatalf("unknown key %d: %q", i, got.ID)
		}
	}
}

// Case 26: the rightmost hop that is no trusted proxy, in one spelling, IPv6 by its prefix.
func TestXForwardedForOfTrustedProxies(t *testing.T) {
	t.Parallel()
	table := compile(t, doc(`  r: {path: /, upstream: up}`))
	const proxy = "10.0.0.1"
	xff := func(lines ...string) http.Header {
		h := http.Header{}
		for _, l := range lines {
			h.Add("X-Forwarded-For", l)
		}
		return h
	}
	for _, test := range []struct {
		name   string
		peer   string
		header http.Header
		bits   int
		want   string
	}{
		{"untrusted peer is believed nothing", "192.0.2.9", xff("1.1.1.1"), 64, "ip:192.0.2.9"},
		{"no header", proxy, xff(), 64, "ip:10.0.0.1"},
		{"one hop", proxy, xff("203.0.113.7"), 64, "ip:203.0.113.7"},
		{"spoofed from the left", proxy, xff("1.1.1.1, 203.0.113.7"), 64, "ip:203.0.113.7"},
		{"through two proxies", proxy, xff("1.1.1.1, 203.0.113.7, 10.9.9.9"), 64, "ip:203.0.113.7"},
		{"two lines", proxy, xff("1.1.1.1", "203.0.113.7"), 64, "ip:203.0.113.7"},
		{"two lines, proxy in the second", proxy, xff("1.1.1.1, 203.0.113.7", "10.9.9.9"), 64, "ip:203.0.113.7"},
		{"all trusted: the leftmost", proxy, xff("10.3.3.3, 10.2.2.2"), 64, "ip:10.3.3.3"},
		{"malformed hop: the nearest trusted", proxy, xff("203.0.113.7, unknown"), 64, "ip:10.0.0.1"},
		{"malformed hop behind a proxy", proxy, xff("203.0.113.7, nonsense, 10.9.9.9"), 64, "ip:10.9.9.9"},
		{"empty hop", proxy, xff("203.0.113.7,"), 64, "ip:10.0.0.1"},
		{"hop with a port", proxy, xff("203.0.113.7:4711"), 64, "ip:203.0.113.7"},
		{"IPv6 hop in brackets", proxy, xff("[2001:db8::1]"), 64, "ip:2001:db8::/64"},
		{"IPv6 hop with a port", proxy, xff("[2001:db8::1]:4711"), 64, "ip:2001:db8::/64"},
		{"IPv4-mapped hop", proxy, xff("::ffff:1.2.3.4"), 64, "ip:1.2.3.4"},
		{"IPv4-mapped peer", "::ffff:1.2.3.4", xff(), 64, "ip:1.2.3.4"},
		{"IPv4-mapped peer is the trusted proxy", "::ffff:10.0.0.1", xff("203.0.113.7"), 64, "ip:203.0.113.7"},
		{"IPv6 peer", "2001:db8:0:1:2:3:4:5", xff(), 64, "ip:2001:db8:0:1::/64"},
		{"IPv6 by /48", "2001:db8:0:1:2:3:4:5", xff(), 48, "ip:2001:db8::/48"},
		{"IPv6 whole", "2001:db8::5", xff(), 128, "ip:2001:db8::5"},
		{"zone", "fe80::1%eth0", xff(), 128, "ip:fe80::1"},
		{"zone in a hop", proxy, xff("2001:db8::1%a"), 128, "ip:2001:db8::1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			i := admission.Identifier{Trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, IPv6Bits: test.bits}
			if got := i.Identify(admission.Request{Header: test.header, Peer: netip.MustParseAddr(test.peer)}, table); got.ID != test.want {
				t.Errorf("got %q, want %q", got.ID, test.want)
			}
		})
	}
	i := admission.Identifier{IPv6Bits: 64}
	for n := range 1000 { // addresses of one /64
		peer := netip.MustParseAddr(fmt.Sprintf("2001:db8::%x:%x", n, n*7))
		if got := i.Identify(admission.Request{Header: headers(), Peer: peer}, table); got.ID != "ip:2001:db8::/64" {
			t.Fatalf("%v: %q", peer, got.ID)
		}
	}
}

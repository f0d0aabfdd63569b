package admission_test

import (
	"net/netip"
	"regexp"
	"testing"

	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// clientForm is what a client can be called: of few characters, and short.
var clientForm = regexp.MustCompile(`^(user:alice|ip:[0-9a-f.:]{2,45}(/64)?)$`)

// Whatever bytes come as keys and addresses: a client is the owner of a key that verifies or an
// address, in one short spelling, and a key that does not verify changes nothing.
func FuzzIdentify(f *testing.F) {
	for _, seed := range []string{"", "alice", "Bearer alice", "bearer\t alice ", "a:b\x00{}\r\n", "1.1.1.1, 192.0.2.7", "[2001:db8::1]:80, ::ffff:10.0.0.1", "fe80::1%eth0", "unknown,,10.0.0.1"} {
		f.Add(seed, seed, seed, seed)
	}
	f.Add("alice", "Basic alice", "203.0.113.9, 10.0.0.2", "10.0.0.1")
	table := compile(f, doc(`  r: {path: /, upstream: up}`))
	identifier := admission.Identifier{Trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, IPv6Bits: 64}
	f.Fuzz(func(t *testing.T, key, authorization, forwarded, more string) {
		for _, peer := range []string{"10.0.0.1", "192.0.2.1", "::ffff:192.0.2.1", "2001:db8:1:2:3::4"} {
			r := admission.Request{
				Header: headers("X-Api-Key", key, "Authorization", authorization, "X-Forwarded-For", forwarded, "X-Forwarded-For", more),
				Peer:   netip.MustParseAddr(peer),
			}
			got := identifier.Identify(r, table)
			if !clientForm.MatchString(got.ID) || got.Known != (got.ID == "user:alice") {
				t.Fatalf("%s with %q: %+v", peer, r.Header, got)
			}
			r.Header = headers("X-Forwarded-For", forwarded, "X-Forwarded-For", more)
			keyless := identifier.Identify(r, table)
			if !got.Known && got != keyless {
				t.Fatalf("%s: keys that do not verify make %+v of %+v", peer, got, keyless)
			}
			r.Header = headers()
			if direct := identifier.Identify(r, table); peer != "10.0.0.1" && keyless != direct {
				t.Fatalf("%s is no trusted proxy, and makes %+v of %+v", peer, keyless, direct)
			}
		}
	})
}

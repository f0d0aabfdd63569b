package admission

import (
	"crypto/sha256"
	"net/netip"
	"strings"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

// KeyHeader carries an API key, as "Authorization: Bearer" does.
const KeyHeader = "X-Api-Key"

// maxKeys bounds how many keys of one request are looked up, and so what a request may cost in hashing.
const maxKeys = 4

// Client is who a request is counted as.
type Client struct {
	// ID is "user:<name>" for a verified key, else "ip:<address>" or "ip:<prefix>/<bits>".
	ID string
	// Addr is the client's address: the peer's, or what a trusted proxy says of it.
	Addr netip.Addr
	// User is set where Known.
	User  policy.UserRules
	Known bool
	// ByKeyHeader says that the key came in X-API-Key: it was meant for the edge, and ends there.
	ByKeyHeader bool

	// bits is the length of the prefix of Addr that an address is counted by; 0: all of it.
	bits int
}

// Identifier tells clients apart.
type Identifier struct {
	// Trusted are the proxies whose X-Forwarded-For counts.
	Trusted []netip.Prefix
	// IPv6Bits is the length of the prefix that IPv6 clients are counted by.
	IPv6Bits int
}

// Users looks up a verified client by the SHA-256 of its key.
type Users interface {
	User(keyHash [sha256.Size]byte) (policy.UserRules, bool)
}

// Directory knows clients that are in no policy: verified ones by their keys, and addresses with rules
// of their own.
type Directory interface {
	Users
	// Address is what an address is held to besides what all are; the zero value for most.
	Address(client string) policy.UserRules
}

// Identify is the client of a request: the first of its keys that verifies, X-API-Key
// before Authorization, else its address. An unknown key is as good as none, so that
// inventing keys gains nothing. All users are asked in turn.
func (i Identifier) Identify(r Request, users ...Users) Client {
	c := i.identify(r, users)
	c.ID = string(c.appendID(nil))
	return c
}

// identify is Identify without the ID.
func (i Identifier) identify(r Request, users []Users) Client {
	addr := i.address(r)
	tried := 0
	for _, header := range [...]string{KeyHeader, "Authorization"} {
		for _, line := range r.Header.Values(header) {
			key := strings.Trim(line, " \t")
			if header != KeyHeader {
				key = bearer(key)
			}
			if key == "" {
				continue
			}
			if tried++; tried > maxKeys {
				break
			}
			hash := sha256.Sum256([]byte(key))
			for _, known := range users {
				if user, ok := known.User(hash); ok {
					return Client{Addr: addr, User: user, Known: true, ByKeyHeader: header == KeyHeader}
				}
			}
		}
	}
	return Client{Addr: addr, bits: i.bits(addr)}
}

// maxID bounds the id of a client that is known by its address; a user's name may be longer.
const maxID = 96

// appendID writes the client's ID.
func (c Client) appendID(b []byte) []byte {
	if c.Known {
		return append(append(b, "user:"...), c.User.Name...)
	}
	b = append(b, "ip:"...)
	if c.bits == 0 {
		return c.Addr.AppendTo(b)
	}
	prefix, err := c.Addr.Prefix(c.bits)
	if err != nil {
		return c.Addr.AppendTo(b)
	}
	return prefix.AppendTo(b)
}

// bearer is the token of a Bearer credential; "" where it is none.
func bearer(credential string) string {
	scheme, token, ok := strings.Cut(strings.ReplaceAll(credential, "\t", " "), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.Trim(token, " ")
}

// Trusts reports whether addr is a trusted proxy.
func (i Identifier) Trusts(addr netip.Addr) bool {
	addr = plain(addr)
	for _, p := range i.Trusted {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// address is the rightmost hop that is no trusted proxy. Everything to the left of
// it was written by someone unknown. A hop that is no address ends the walk too: then
// the nearest trusted address stands for the client, since what that proxy saw can't be told.
func (i Identifier) address(r Request) netip.Addr {
	addr := plain(r.Peer)
	if !i.Trusts(addr) {
		return addr
	}
	lines := r.Header.Values("X-Forwarded-For")
	for n := len(lines) - 1; n >= 0; n-- {
		for rest := lines[n]; ; {
			cut := strings.LastIndexByte(rest, ',')
			hop, ok := parseHop(rest[cut+1:])
			if !ok {
				return addr
			}
			addr = hop
			if !i.Trusts(addr) {
				return addr
			}
			if cut < 0 {
				break
			}
			rest = rest[:cut]
		}
	}
	return addr
}

// parseHop reads an address as proxies write it: bare, with a port, or in brackets.
func parseHop(s string) (netip.Addr, bool) {
	s = strings.Trim(s, " \t")
	if addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")); err == nil {
		return plain(addr), true
	}
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return plain(ap.Addr()), true
	}
	return netip.Addr{}, false
}

// plain is the one spelling of an address: IPv4-mapped IPv6 is IPv4, and a zone is dropped.
func plain(addr netip.Addr) netip.Addr { return addr.Unmap().WithZone("") }

// bits is the length of the prefix that an address is counted by; 0: all of it.
func (i Identifier) bits(addr netip.Addr) int {
	if !addr.Is6() || i.IPv6Bits >= addr.BitLen() {
		return 0
	}
	return i.IPv6Bits
}

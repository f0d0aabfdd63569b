package admission

import "net/netip"

// Request is what deciding needs to know of a request.
type Request struct {
	Method string
	// Host is the authority asked for, with or without its port.
	Host string
	// Path is decoded; the policy cleans it.
	Path string
	// Header is read before hop-by-hop headers are removed, so that a client can't hide
	// its key behind "Connection: X-API-Key".
	Header Header
	// Length is the declared length of the body, negative where it is unknown.
	Length int64
	// Peer is the other end of the socket.
	Peer netip.Addr
}

// Header looks up every line of a header by its canonical name; http.Header is one.
type Header interface {
	Values(name string) []string
}

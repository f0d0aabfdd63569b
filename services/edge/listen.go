package edge

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/pires/go-proxyproto"

	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// proxyHeaderTimeout bounds the wait for a PROXY protocol header.
const proxyHeaderTimeout = 5 * time.Second

// listen opens the socket that clients are served on.
func listen(cfg Config, trusted admission.Identifier) (net.Listener, error) {
	ln, err := net.Listen("tcp", cfg.Addr)
	if err != nil {
		return nil, fmt.Errorf("addr: %w", err)
	}
	if !cfg.ProxyProtocol {
		return ln, nil
	}
	return &proxyproto.Listener{
		Listener:          ln,
		ReadHeaderTimeout: proxyHeaderTimeout,
		// A trusted proxy must send the header: if it could leave it out, its clients could write
		// one. From others it is nothing special, and so no HTTP.
		ConnPolicy: func(o proxyproto.ConnPolicyOptions) (proxyproto.Policy, error) {
			peer, err := netip.ParseAddrPort(o.Upstream.String())
			if err == nil && trusted.Trusts(peer.Addr()) {
				return proxyproto.REQUIRE, nil
			}
			return proxyproto.SKIP, nil
		},
	}, nil
}

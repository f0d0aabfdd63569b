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
	ln = patientListener{ln, cfg.WriteTimeout}
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

// patientListener ends connections whose clients stop reading. The server has no timeout of its own for an
// answer, which may stream for as long as it likes.
type patientListener struct {
	net.Listener
	patience time.Duration
}

func (l patientListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &patientConn{conn.(*net.TCPConn), l.patience}, nil
}

// patientConn bounds each write.
type patientConn struct {
	*net.TCPConn
	patience time.Duration
}

func (c *patientConn) Write(p []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.patience)); err != nil {
		return 0, err
	}
	return c.TCPConn.Write(p)
}

package framing

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// tlsListener gives connections whose handshake is done: *tls.Conn to those that speak HTTP/2, which
// net/http knows by that type, and a checked one to the others.
type tlsListener struct {
	*listener
	config *tls.Config
	ready  chan accepted
	once   sync.Once
	closed chan struct{}
}

type accepted struct {
	conn net.Conn
	err  error
}

func newTLSListener(l *listener, config *tls.Config) *tlsListener {
	t := &tlsListener{listener: l, config: config, ready: make(chan accepted), closed: make(chan struct{})}
	go t.run()
	return t
}

func (t *tlsListener) run() {
	for {
		c, err := t.listener.Listener.Accept()
		if err == nil {
			go t.handshake(c)
			continue
		}
		if !t.give(accepted{err: err}) { // the server waits before it asks again
			return
		}
	}
}

// handshake hands over a connection once its handshake is done, so that a slow one holds up no other.
func (t *tlsListener) handshake(plain net.Conn) {
	c := tls.Server(plain, t.config)
	ctx, cancel := context.WithTimeout(context.Background(), handshakeTimeout)
	defer cancel()
	if err := c.HandshakeContext(ctx); err != nil {
		t.logf("TLS handshake with %s: %v", plain.RemoteAddr(), err)
		if bad := (tls.RecordHeaderError{}); errors.As(err, &bad) && bad.Conn != nil {
			_ = plain.SetWriteDeadline(time.Now().Add(time.Second))
			_, _ = io.WriteString(plain, "HTTP/1.0 400 Bad Request\r\n\r\nThis is an HTTPS server.\n")
		}
		plain.Close()
		return
	}
	var ready net.Conn = c
	if c.ConnectionState().NegotiatedProtocol != "h2" {
		ready = &tlsConn{conn: conn{Conn: c, logf: t.logf}, secure: c}
	}
	if !t.give(accepted{conn: ready}) {
		c.Close()
	}
}

func (t *tlsListener) give(a accepted) (taken bool) {
	select {
	case t.ready <- a:
		return true
	case <-t.closed:
		return false
	}
}

func (t *tlsListener) Accept() (net.Conn, error) {
	select {
	case a := <-t.ready:
		return a.conn, a.err
	case <-t.closed:
		return nil, net.ErrClosed
	}
}

func (t *tlsListener) Close() error {
	t.once.Do(func() { close(t.closed) })
	return t.listener.Close()
}

// tlsConn tells net/http of its TLS, without being a *tls.Conn.
type tlsConn struct {
	conn
	secure *tls.Conn
}

func (c *tlsConn) ConnectionState() tls.ConnectionState { return c.secure.ConnectionState() }

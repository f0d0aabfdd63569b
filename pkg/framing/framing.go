package framing

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

const (
	// handshakeTimeout bounds a TLS handshake.
	handshakeTimeout = 5 * time.Second
	// lingering is how long a connection that was refused is kept for its 400 to be read.
	lingering = 500 * time.Millisecond
)

// What a refused line is replaced by. Wherever a line ends, in a head one of these lines has no
// colon; a chunk size or a trailer gets longer than net/http takes.
var (
	noHead = []byte("\x00\r\n\x00\r\n\r\n")
	noBody = bytes.Repeat([]byte("x"), 8<<10)
)

// Serve is s.Serve, or s.ServeTLS where s has a TLSConfig, on connections whose framing is checked.
// It changes s, which must not be served anew.
func Serve(s *http.Server, ln net.Listener) error {
	l := &listener{Listener: ln, h2c: s.Protocols != nil && s.Protocols.UnencryptedHTTP2(), logf: func(string, ...any) {}}
	if s.ErrorLog != nil {
		l.logf = s.ErrorLog.Printf
	}
	told := s.ConnState
	s.ConnState = func(c net.Conn, state http.ConnState) {
		if state == http.StateHijacked {
			passThrough(c)
		}
		if told != nil {
			told(c, state)
		}
	}
	if s.TLSConfig == nil {
		return s.Serve(l)
	}
	s.TLSConfig = s.TLSConfig.Clone()
	s.TLSConfig.NextProtos = []string{"h2", "http/1.1"} // by the first, s sets up HTTP/2
	secure := newTLSListener(l, s.TLSConfig.Clone())
	defer secure.Close()
	return s.Serve(secure)
}

// listener checks what comes on the connections that it accepts.
type listener struct {
	net.Listener
	h2c  bool
	logf func(format string, args ...any)
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c, scanner: scanner{h2: l.h2c}, logf: l.logf}, nil
}

// conn is a connection whose reads are checked. Nobody reads it while it is passed through.
type conn struct {
	net.Conn
	scanner scanner
	logf    func(format string, args ...any)
	refused atomic.Bool
	rest    []byte // of what is read instead of what was refused
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	if c.refused.Load() {
		n := copy(p, c.rest)
		c.rest = c.rest[n:]
		if n == 0 && len(p) > 0 {
			return 0, io.EOF
		}
		return n, nil
	}
	n, err := c.Conn.Read(p)
	passed, refusal := c.scanner.scan(p[:n])
	if refusal == "" {
		return n, err
	}
	c.logf("request from %s refused: %s", c.RemoteAddr(), refusal)
	c.rest = noHead
	if c.scanner.state >= body {
		c.rest = noBody
	}
	c.refused.Store(true)
	if passed > 0 {
		return passed, nil
	}
	return c.Read(p)
}

// CloseWrite ends what is sent, where the connection can.
func (c *conn) CloseWrite() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}

// Close closes the connection. A refusal may leave bytes unread, for which the kernel would reset the
// connection, and the 400 be lost with it; so they are read first.
func (c *conn) Close() error {
	if !c.refused.Load() || c.CloseWrite() != nil {
		return c.Conn.Close()
	}
	go func() {
		defer c.Conn.Close()
		_ = c.Conn.SetReadDeadline(time.Now().Add(lingering))
		_, _ = io.Copy(io.Discard, c.Conn)
	}()
	return nil
}

// passThrough leaves a connection alone from here on.
func passThrough(c net.Conn) {
	switch c := c.(type) {
	case *conn:
		c.scanner.state = through
	case *tlsConn:
		c.scanner.state = through
	}
}

package framing_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/framing"
)

// server is a real one on a free port.
type server struct {
	t    *testing.T
	addr string
	http *http.Server
	done chan error

	mu  sync.Mutex
	log bytes.Buffer
}

func (s *server) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.Write(p)
}

func (s *server) logged() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.String()
}

// serve answers with what it sees of a request.
func serve(t *testing.T, change func(*http.Server)) *server {
	t.Helper()
	s := &server{t: t, done: make(chan error, 1)}
	s.http = &http.Server{
		ErrorLog:          log.New(s, "", 0),
		ReadHeaderTimeout: 5 * time.Second,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				w.Header().Set("Connection", "close")
				http.Error(w, "broken body", http.StatusBadRequest)
				return
			}
			fmt.Fprintf(w, "%s %s %t %d", r.Proto, r.URL.Path, r.TLS != nil, len(body))
		}),
	}
	if change != nil {
		change(s.http)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.addr = ln.Addr().String()
	go func() { s.done <- framing.Serve(s.http, ln) }()
	t.Cleanup(func() { s.http.Close() })
	return s
}

// dial opens a connection, over TLS if there is a config.
func (s *server) dial(config *tls.Config) net.Conn {
	s.t.Helper()
	conn, err := net.Dial("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	if config != nil {
		conn = tls.Client(conn, config)
	}
	s.t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	return conn
}

// answers reads the statuses and the last body of all answers until the server closes.
func answers(t *testing.T, conn net.Conn) (statuses []int, last string) {
	t.Helper()
	in := bufio.NewReader(conn)
	for {
		res, err := http.ReadResponse(in, nil)
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("after %v: %v", statuses, err)
			}
			return statuses, last
		}
		body, err := io.ReadAll(res.Body)
		if err != nil {
			t.Errorf("answer %d: %v", len(statuses), err)
		}
		statuses, last = append(statuses, res.StatusCode), string(body)
	}
}

// certificate is one for 127.0.0.1, and the client's side of it.
func certificate(t *testing.T) (*tls.Config, func(protos ...string) *tls.Config) {
	s := httptest.NewTLSServer(nil)
	t.Cleanup(s.Close)
	roots := s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	return &tls.Config{Certificates: s.TLS.Certificates}, func(protos ...string) *tls.Config {
		return &tls.Config{RootCAs: roots, ServerName: "127.0.0.1", NextProtos: protos}
	}
}

// Requests are answered up to the one that is refused. Its 400 arrives, though the client goes on sending.
func TestRefusalIsHeard(t *testing.T) {
	t.Parallel()
	config, of := certificate(t)
	for name, s := range map[string]*server{"plain": serve(t, nil), "TLS": serve(t, func(s *http.Server) { s.TLSConfig = config })} {
		var clientTLS *tls.Config
		if name == "TLS" {
			clientTLS = of("http/1.1")
		}
		for _, bad := range []string{
			"GET /bad HTTP/1.1\nHost: x\r\n\r\n",
			"POST /bad HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n",
		} {
			conn := s.dial(clientTLS)
			const good = "POST /good HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
			if _, err := io.WriteString(conn, good+bad+strings.Repeat("more\n", 10_000)); err != nil {
				t.Fatal(err)
			}
			if statuses, _ := answers(t, conn); len(statuses) != 2 || statuses[0] != 200 || statuses[1] != 400 {
				t.Errorf("%s, %q: answers %v", name, bad, statuses)
			}
		}
		if !strings.Contains(s.logged(), "refused: a bare line feed") {
			t.Errorf("%s: nothing is logged of it: %s", name, s.logged())
		}
	}
}

// Half an HTTP/2 preface is refused as any other head. Its first half is a request to net/http, the last of its connection.
func TestHalfAPrefaceIsRefused(t *testing.T) {
	t.Parallel()
	s := serve(t, func(s *http.Server) {
		s.Protocols = new(http.Protocols)
		s.Protocols.SetHTTP1(true)
		s.Protocols.SetUnencryptedHTTP2(true)
	})
	for sent, status := range map[string]int{"PRI * HTTP/2.0\r\nHost: x\r\n\r\n": 400, "PRI * HTTP/2.0\r\n\r\nGET /a HTTP/1.1\nHost: x\r\n\r\n": 200} {
		conn := s.dial(nil)
		io.WriteString(conn, sent)
		if statuses, body := answers(t, conn); len(statuses) != 1 || statuses[0] != status {
			t.Errorf("%q: %v %s", sent, statuses, body)
		}
	}
}

// All that is right is served: HTTP/1.1 and HTTP/2, with TLS and without, and net/http knows of the TLS.
func TestProtocols(t *testing.T) {
	t.Parallel()
	config, of := certificate(t)
	plain := serve(t, func(s *http.Server) {
		s.Protocols = new(http.Protocols)
		s.Protocols.SetHTTP1(true)
		s.Protocols.SetUnencryptedHTTP2(true)
	})
	secure := serve(t, func(s *http.Server) { s.TLSConfig = config })
	only := func(set func(*http.Protocols)) *http.Protocols {
		p := new(http.Protocols)
		set(p)
		return p
	}
	one, two := only(func(p *http.Protocols) { p.SetHTTP1(true) }), only(func(p *http.Protocols) { p.SetHTTP2(true) })
	for _, c := range []struct {
		url    string
		protos *http.Protocols
		want   string
	}{
		{"http://" + plain.addr, one, "HTTP/1.1 /x false 70000"},
		{"http://" + plain.addr, only(func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) }), "HTTP/2.0 /x false 70000"},
		{"https://" + secure.addr, one, "HTTP/1.1 /x true 70000"},
		{"https://" + secure.addr, two, "HTTP/2.0 /x true 70000"},
	} {
		client := &http.Client{Transport: &http.Transport{Protocols: c.protos, TLSClientConfig: of()}, Timeout: 20 * time.Second}
		for range 3 { // on one connection
			for _, declared := range []bool{true, false} {
				var body io.Reader = strings.NewReader(strings.Repeat("x\n", 35_000))
				if !declared {
					body = io.MultiReader(body)
				}
				res, err := client.Post(c.url+"/x", "text/plain", body)
				if err != nil {
					t.Fatalf("%s: %v", c.want, err)
				}
				got, _ := io.ReadAll(res.Body)
				res.Body.Close()
				if string(got) != c.want {
					t.Errorf("got %q, want %q", got, c.want)
				}
			}
		}
		client.CloseIdleConnections()
	}
}

// What comes after an upgrade is nobody's business here.
func TestUpgradedConnectionsPass(t *testing.T) {
	t.Parallel()
	config, of := certificate(t)
	upgrade := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n")
		io.CopyN(conn, rw, 8)
	})
	for name, secure := range map[string]bool{"plain": false, "TLS": true} {
		s := serve(t, func(s *http.Server) {
			s.Handler = upgrade
			if secure {
				s.TLSConfig = config
			}
		})
		var clientTLS *tls.Config
		if secure {
			clientTLS = of("http/1.1")
		}
		conn := s.dial(clientTLS)
		io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n")
		in := bufio.NewReader(conn)
		if res, err := http.ReadResponse(in, nil); err != nil || res.StatusCode != 101 {
			t.Fatalf("%s: %v, %v", name, res, err)
		}
		const raw = "\n\r \x00:\n\r\n"
		io.WriteString(conn, raw)
		got := make([]byte, len(raw))
		if _, err := io.ReadFull(in, got); err != nil || string(got) != raw {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// A client that does not finish its handshake holds up no other, and one that speaks no TLS is told so.
func TestHandshakes(t *testing.T) {
	t.Parallel()
	config, of := certificate(t)
	s := serve(t, func(s *http.Server) { s.TLSConfig = config })
	stalled := s.dial(nil)
	stalled.Write([]byte{0x16, 3, 1})
	conn := s.dial(of("http/1.1"))
	io.WriteString(conn, "GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	if statuses, body := answers(t, conn); len(statuses) != 1 || body != "HTTP/1.1 /a true 0" {
		t.Errorf("beside a stalled handshake: %v %s", statuses, body)
	}
	plain := s.dial(nil)
	io.WriteString(plain, "GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
	if statuses, body := answers(t, plain); len(statuses) != 1 || statuses[0] != 400 || !strings.Contains(body, "HTTPS") {
		t.Errorf("without TLS: %v %s", statuses, body)
	}
	if n, err := stalled.Read(make([]byte, 100)); !errors.Is(err, io.EOF) && n == 0 {
		t.Errorf("the stalled one: %v", err)
	}
}

// Serve ends as the server's own does, and leaves no connection behind.
func TestServeEnds(t *testing.T) {
	t.Parallel()
	config, of := certificate(t)
	for name, change := range map[string]func(*http.Server){"plain": nil, "TLS": func(s *http.Server) { s.TLSConfig = config }} {
		s := serve(t, change)
		var clientTLS *tls.Config
		if change != nil {
			clientTLS = of("http/1.1")
		}
		idle := s.dial(clientTLS)
		io.WriteString(idle, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		if _, err := http.ReadResponse(bufio.NewReader(idle), nil); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := s.http.Shutdown(ctx); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		select {
		case err := <-s.done:
			if !errors.Is(err, http.ErrServerClosed) {
				t.Errorf("%s: %v", name, err)
			}
		case <-ctx.Done():
			t.Errorf("%s: Serve does not return", name)
		}
		if _, err := io.Copy(io.Discard, idle); err != nil {
			t.Errorf("%s: the connection stays: %v", name, err)
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	if err := framing.Serve(&http.Server{TLSConfig: config.Clone()}, ln); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a closed listener: %v", err)
	}
}

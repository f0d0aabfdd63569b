package telemetry

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"net"
	"net/http"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/framing"
)

// Bounds of every HTTP server.
const (
	readHeaderTimeout = 5 * time.Second
	idleTimeout       = 2 * time.Minute
	// maxHeaderBytes bounds a request's head; net/http allows 4 KiB more and
	// answers 431 above that.
	maxHeaderBytes = 32 << 10
	// healthcheckTimeout bounds Healthcheck.
	healthcheckTimeout = 2 * time.Second
)

// ServerOption changes a server of NewHTTPServer.
type ServerOption func(*http.Server)

// H2C also allows HTTP/2 without TLS, to clients that know of it beforehand.
func H2C() ServerOption {
	return func(s *http.Server) {
		s.Protocols = new(http.Protocols)
		s.Protocols.SetHTTP1(true)
		s.Protocols.SetHTTP2(true)
		s.Protocols.SetUnencryptedHTTP2(true)
	}
}

// TLS serves HTTPS, and HTTP/2 by it, with the certificates that config gives.
func TLS(config *tls.Config) ServerOption {
	return func(s *http.Server) { s.TLSConfig = config }
}

// NewHTTPServer gives the one server set-up. It has no timeout on bodies and
// answers, since those may stream; handlers bound what they read.
func NewHTTPServer(handler http.Handler, log zerolog.Logger, opts ...ServerOption) *http.Server {
	s := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: readHeaderTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          stdlog.New(errorLog{log.With().Str("component", "http").Logger()}, "", 0),
	}
	for _, opt := range opts {
		opt(s)
	}
	return s
}

// errorLog takes what net/http has to say: mostly clients that misbehave.
type errorLog struct{ log zerolog.Logger }

func (l errorLog) Write(line []byte) (int, error) {
	l.log.Warn().Msg(string(bytes.TrimSpace(line)))
	return len(line), nil
}

// Serve answers requests on ln, whose framing is checked, until ctx ends; then it takes no new
// ones, gives those in flight the time drain to finish, and cuts the rest.
func Serve(ctx context.Context, s *http.Server, ln net.Listener, drain time.Duration) error {
	served := make(chan error, 1)
	go func() { served <- framing.Serve(s, ln) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve on %s: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
	defer cancel()
	if err := s.Shutdown(bound); err != nil {
		if !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("stop serving on %s: %w", ln.Addr(), err)
		}
		if s.ErrorLog != nil {
			s.ErrorLog.Printf("requests on %s were cut off after %s of draining", ln.Addr(), drain)
		}
		return s.Close()
	}
	return nil
}

// Healthcheck succeeds when url answers 200 within two seconds. Images without
// a shell use it through the service's own binary.
func Healthcheck(url string) error {
	client := http.Client{Timeout: healthcheckTimeout}
	resp, err := client.Get(url)
	if err != nil {
		return fmt.Errorf("healthcheck: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	if err != nil {
		return fmt.Errorf("healthcheck: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("healthcheck: %s answered %s: %s", url, resp.Status, bytes.TrimSpace(body))
	}
	return nil
}

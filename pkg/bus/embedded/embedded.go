// Package embedded runs a NATS server with JetStream inside this process, for
// `aegis up` and for tests. It handles no signals: its owner calls Shutdown,
// after every client has closed.
package embedded

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/rs/zerolog"
)

// readyTimeout bounds Start; recovering large streams takes seconds.
const readyTimeout = 30 * time.Second

// maxPayload holds the largest message of the system, a config version of a 1 MiB document.
const maxPayload = 2 << 20

// Config says where the server keeps its streams and whether others can reach it.
type Config struct {
	// StoreDir holds the streams. One server at a time may use it.
	StoreDir string
	// Host and Port are where it listens for TCP clients. Port 0: it does not
	// listen, only InProcess reaches it; -1: a free port.
	Host string
	Port int
	// ConfigFile is an optional nats-server configuration (users, permissions,
	// limits); the fields above override it.
	ConfigFile string
	Log        zerolog.Logger
}

// Server is a running server.
type Server struct{ ns *server.Server }

// Start runs a server and returns when clients can connect and JetStream is up.
// Every stored message is on disk before it is acknowledged.
func Start(cfg Config) (*Server, error) {
	if cfg.StoreDir == "" {
		return nil, errors.New("embedded NATS: StoreDir must be set")
	}
	opts := &server.Options{}
	if cfg.ConfigFile != "" {
		var err error
		if opts, err = server.ProcessConfigFile(cfg.ConfigFile); err != nil {
			return nil, fmt.Errorf("embedded NATS: %w", err)
		}
	}
	opts.ServerName = "aegis-embedded"
	opts.JetStream = true
	opts.StoreDir = cfg.StoreDir
	opts.SyncAlways = true
	opts.NoSigs = true
	opts.HTTPPort, opts.HTTPSPort = 0, 0
	opts.Host, opts.Port = cfg.Host, cfg.Port
	if opts.Host == "" {
		opts.Host = "127.0.0.1"
	}
	opts.DontListen = cfg.Port == 0
	if opts.MaxPayload == 0 {
		opts.MaxPayload = maxPayload
	}
	ns, err := server.NewServer(opts)
	if err != nil {
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	log := &logger{log: cfg.Log.With().Str("component", "nats-server").Logger(), fatal: make(chan string, 1)}
	ns.SetLoggerV2(log, false, false, false)
	s := &Server{ns: ns}
	ready := make(chan bool, 1)
	go func() {
		ns.Start()
		ready <- ns.ReadyForConnections(readyTimeout) && ns.JetStreamEnabled()
	}()
	select {
	case why := <-log.fatal:
		s.Shutdown()
		return nil, fmt.Errorf("embedded NATS: %s", why)
	case up := <-ready:
		if !up {
			s.Shutdown()
			return nil, fmt.Errorf("embedded NATS: not ready within %s", readyTimeout)
		}
		return s, nil
	}
}

// InProcessConn gives a connection without a network; with it a Server is a
// bus.InProcessConnProvider.
func (s *Server) InProcessConn() (net.Conn, error) { return s.ns.InProcessConn() }

// InProcess gives the server as what bus.Config.InProcess takes.
func (s *Server) InProcess() interface{ InProcessConn() (net.Conn, error) } { return s }

// URL is where TCP clients reach the server; "" when it does not listen.
func (s *Server) URL() string {
	if a := s.ns.Addr(); a != nil {
		return "nats://" + a.String()
	}
	return ""
}

// Shutdown stops the server and waits until everything is on disk. It may be called again.
func (s *Server) Shutdown() {
	s.ns.Shutdown()
	s.ns.WaitForShutdown()
}

// logger writes the server's log lines with zerolog. Notices are routine here: debug.
type logger struct {
	log   zerolog.Logger
	fatal chan string // takes the first reason why the server cannot run
}

func (l *logger) Noticef(format string, v ...any) { l.write(l.log.Debug(), format, v) }
func (l *logger) Warnf(format string, v ...any)   { l.write(l.log.Warn(), format, v) }
func (l *logger) Errorf(format string, v ...any)  { l.write(l.log.Error(), format, v) }
func (l *logger) Debugf(format string, v ...any)  { l.write(l.log.Debug(), format, v) }
func (l *logger) Tracef(format string, v ...any)  { l.write(l.log.Trace(), format, v) }
func (l *logger) Fatalf(format string, v ...any) {
	select {
	case l.fatal <- strings.TrimSpace(fmt.Sprintf(format, v...)):
	default:
	}
	l.write(l.log.Error(), format, v)
}

func (l *logger) write(e *zerolog.Event, format string, v []any) {
	e.Msg(strings.TrimSpace(fmt.Sprintf(format, v...)))
}

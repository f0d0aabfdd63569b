package stack

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"

	"github.com/rs/zerolog"
)

// Config says where the parts of a stack listen and what they start from. Its tags are kong's.
// An address with port 0 gets a free one.
type Config struct {
	EdgeAddr     string `name:"edge-addr" default:"127.0.0.1:8080" help:"Where the edge serves clients."`
	ControlAddr  string `name:"control-addr" default:"127.0.0.1:8090" help:"Where the controlplane takes changes."`
	NATSAddr     string `name:"nats-addr" default:"127.0.0.1:4222" help:"Where the embedded NATS server listens, for the nats command line."`
	UpstreamAddr string `name:"upstream-addr" default:"127.0.0.1:8070" help:"Where the sample upstream listens."`

	EdgeAdminAddr        string `name:"edge-admin-addr" default:"127.0.0.1:8081" help:"Health and metrics of the edge."`
	SettlerAdminAddr     string `name:"settler-admin-addr" default:"127.0.0.1:8082" help:"Health and metrics of the settler."`
	HealthwatchAdminAddr string `name:"healthwatch-admin-addr" default:"127.0.0.1:8083" help:"Health and metrics of healthwatch."`
	ControlAdminAddr     string `name:"control-admin-addr" default:"127.0.0.1:8084" help:"Health and metrics of the controlplane."`

	Redis    string `name:"redis" placeholder:"URL" help:"Use this Redis, redis://[user:password@]host:port, instead of a private redis-server (or the embedded one, where none is on PATH)."`
	RulesDSN string `name:"rules-dsn" env:"AEGIS_RULES_DSN" placeholder:"DSN" help:"PostgreSQL that holds users, keys and plans, such as postgres://aegis@127.0.0.1/aegis (its password by PGPASSWORD); default: they lie in JetStream."`
	DataDir  string `name:"data-dir" default:"data" type:"path" help:"Where NATS and the edge keep their files; one stack at a time."`
	Policy   string `name:"policy" type:"existingfile" placeholder:"FILE" help:"Policy to start from while there is none in the data directory; default: the sample policy."`

	// AdminToken, if set, is asked for with every change; without it only this machine may change anything.
	AdminToken string         `kong:"-"`
	Log        zerolog.Logger `kong:"-"`
}

// address is a place to listen, and the flag that moves it.
type address struct {
	flag, addr string
}

func (c Config) addresses() []address {
	return []address{
		{"edge-addr", c.EdgeAddr},
		{"control-addr", c.ControlAddr},
		{"nats-addr", c.NATSAddr},
		{"upstream-addr", c.UpstreamAddr},
		{"edge-admin-addr", c.EdgeAdminAddr},
		{"settler-admin-addr", c.SettlerAdminAddr},
		{"healthwatch-admin-addr", c.HealthwatchAdminAddr},
		{"control-admin-addr", c.ControlAdminAddr},
	}
}

// Validate reports the first setting that cannot work.
func (c Config) Validate() error {
	if c.DataDir == "" {
		return errors.New("--data-dir: must be set")
	}
	for _, a := range c.addresses() {
		if _, _, err := a.split(); err != nil {
			return err
		}
	}
	if host, _, _ := net.SplitHostPort(c.NATSAddr); c.AdminToken == "" && !loopback(host) {
		return fmt.Errorf("--nats-addr: %s can be reached from other machines, and without AEGIS_ADMIN_TOKEN whoever reaches NATS may change limits: set the token or listen on 127.0.0.1", c.NATSAddr)
	}
	return nil
}

func (a address) split() (host string, port int, err error) {
	host, text, err := net.SplitHostPort(a.addr)
	if err == nil {
		port, err = strconv.Atoi(text)
	}
	if err != nil || port < 0 || port > 65535 {
		return "", 0, fmt.Errorf("--%s: %q is not an address: want host:port, such as 127.0.0.1:8080", a.flag, a.addr)
	}
	return host, port, nil
}

// checkFree looks whether every address can be listened on, before anything starts: the
// parts would find out too, but not which flag to change.
func (c Config) checkFree() error {
	for _, a := range c.addresses() {
		l, err := net.Listen("tcp", a.addr)
		switch {
		case errors.Is(err, syscall.EADDRINUSE):
			return fmt.Errorf("--%s: %s is in use: stop what listens there, or choose another address", a.flag, a.addr)
		case err != nil:
			return fmt.Errorf("--%s: %w", a.flag, err)
		}
		if err := l.Close(); err != nil {
			return fmt.Errorf("--%s: %w", a.flag, err)
		}
	}
	return nil
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback()
}

package bus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
)

// Bounds on how long the bus waits.
const (
	// callTimeout bounds an operation whose context has no earlier deadline.
	callTimeout = 5 * time.Second
	// writeTimeout bounds one write to a server that reads no more.
	writeTimeout = 2 * time.Second
	// closeTimeout bounds Close.
	closeTimeout = 5 * time.Second
	// pingEvery and two missed answers bound the life of a dead connection.
	pingEvery = 5 * time.Second
	// sendQueue is how many core messages may wait for the network.
	sendQueue = 4096
)

// InProcessConnProvider gives connections to a NATS server in this process.
type InProcessConnProvider = nats.InProcessConnProvider

// Config says how to reach NATS. Its tags are those of kong.
type Config struct {
	URL          string `name:"nats-url" env:"AEGIS_NATS_URL" default:"nats://127.0.0.1:4222" help:"NATS servers, comma separated."`
	User         string `name:"nats-user" env:"AEGIS_NATS_USER" help:"NATS user."`
	PasswordFile string `name:"nats-password-file" env:"AEGIS_NATS_PASSWORD_FILE" type:"path" help:"File holding the NATS password, read at every connect; or give it as AEGIS_NATS_PASSWORD."`
	Replicas     int    `name:"nats-replicas" env:"AEGIS_NATS_REPLICAS" default:"1" help:"Copies of every stream, where this process provisions them (1, 3 or 5)."`

	// Password is the user's. Secrets takes it from the environment: a flag would show it to everybody on the machine.
	Password string `kong:"-"`
	// Name is the service's name; the server shows it for the connection.
	Name string `kong:"-"`
	// InboxPrefix is where answers come back; default "_INBOX_<Name>", so that
	// each service's NATS user can be confined to its own.
	InboxPrefix string `kong:"-"`
	// InProcess, when set, replaces URL.
	InProcess InProcessConnProvider `kong:"-"`
}

// Secrets takes what must not be a flag from the environment: AEGIS_NATS_PASSWORD.
func (c *Config) Secrets(getenv func(string) string) { c.Password = getenv("AEGIS_NATS_PASSWORD") }

// Validate reports the first setting that cannot work.
func (c Config) Validate() error {
	switch {
	case c.InProcess == nil && c.URL == "":
		return errors.New("nats-url: must be set, for instance nats://127.0.0.1:4222")
	case c.Password != "" && c.PasswordFile != "":
		return errors.New("nats-password, nats-password-file: set one of them, not both")
	case c.User == "" && (c.Password != "" || c.PasswordFile != ""):
		return errors.New("nats-user: must be set when a password is")
	case c.Replicas < 0 || c.Replicas > 5 || c.Replicas == 2 || c.Replicas == 4:
		return fmt.Errorf("nats-replicas: %d is not 1, 3 or 5", c.Replicas)
	}
	return nil
}

// password is the one in force now.
func (c Config) password() (string, error) {
	if c.PasswordFile == "" {
		return c.Password, nil
	}
	data, err := os.ReadFile(c.PasswordFile)
	if err != nil {
		return "", fmt.Errorf("nats-password-file: %w", err)
	}
	return strings.TrimRight(string(data), "\r\n"), nil
}

// Bus is a connection to NATS that mends itself. It is safe for concurrent use.
type Bus struct {
	conn     *nats.Conn
	js       jetstream.JetStream
	log      zerolog.Logger
	replicas int
	calls    calls

	outgoing chan outgoing
	closing  chan struct{}
	sent     chan struct{} // closed when the sender has emptied outgoing

	mu       sync.Mutex
	connects chan struct{} // closed and replaced at every connect

	// connected mirrors the connection's state: asking nats.go waits for its
	// lock, which a write to a stalled server holds.
	connected atomic.Bool
	refreshMu sync.Mutex

	closeOnce    sync.Once
	nagReconnect nag
	made         atomic.Uint64 // connections
	slow         atomic.Uint64
	dropped      atomic.Uint64
	denied       atomic.Uint64
}

// Stats counts what went wrong since Connect.
type Stats struct {
	Reconnects uint64 // connections made after the first
	Slow       uint64 // times that a subscriber fell behind and lost messages
	Dropped    uint64 // Sends that no server took
	Denied     uint64 // permission violations
}

// Connect begins to connect, and goes on trying for as long as the Bus lives:
// a server that is away is no error. It waits for the first attempt only.
func Connect(ctx context.Context, cfg Config, log zerolog.Logger) (*Bus, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Name == "" { // not in Validate, which kong calls before a main can set it
		return nil, errors.New("bus: Config.Name must be the service's name")
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if _, err := cfg.password(); err != nil {
		return nil, err
	}
	if cfg.InboxPrefix == "" {
		cfg.InboxPrefix = "_INBOX_" + cfg.Name
	}
	b := &Bus{
		log:      log.With().Str("component", "bus").Logger(),
		replicas: max(1, cfg.Replicas),
		outgoing: make(chan outgoing, sendQueue),
		closing:  make(chan struct{}),
		sent:     make(chan struct{}),
		connects: make(chan struct{}),
	}
	opts := []nats.Option{
		nats.Name(cfg.Name),
		nats.CustomInboxPrefix(cfg.InboxPrefix),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.IgnoreAuthErrorAbort(), // a server may learn of a user later than the user comes
		nats.CustomReconnectDelay(reconnectDelay),
		nats.ReconnectBufSize(-1), // no connection: fail at once, never deliver late
		nats.Timeout(2 * time.Second),
		nats.PingInterval(pingEvery),
		nats.MaxPingsOutstanding(2),
		nats.FlusherTimeout(writeTimeout),
		nats.DrainTimeout(closeTimeout),
		nats.ConnectHandler(b.onConnect),
		nats.ReconnectHandler(b.onConnect),
		nats.DisconnectErrHandler(b.onDisconnect),
		nats.ReconnectErrHandler(b.onReconnectError),
		nats.ErrorHandler(b.onError),
	}
	if cfg.User != "" {
		opts = append(opts, nats.UserInfoHandler(func() (string, string) {
			pw, err := cfg.password()
			if err != nil {
				b.log.Error().Err(err).Msg("cannot read the NATS password")
			}
			return cfg.User, pw
		}))
	}
	if cfg.InProcess != nil {
		opts = append(opts, nats.InProcessServer(cfg.InProcess))
	}
	conn, err := nats.Connect(cfg.URL, opts...)
	if err != nil {
		return nil, fmt.Errorf("nats-url: %w", err)
	}
	js, err := jetstream.New(conn)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("bus: %w", err)
	}
	b.conn, b.js = conn, js
	b.refresh(conn)
	go b.sender()
	return b, nil
}

// Connected reports whether a server is there now.
func (b *Bus) Connected() bool { return b.connected.Load() }

func (b *Bus) refresh(c *nats.Conn) {
	b.refreshMu.Lock()
	defer b.refreshMu.Unlock()
	b.connected.Store(c.IsConnected())
}

// Stats counts what went wrong since Connect.
func (b *Bus) Stats() Stats {
	return Stats{
		Reconnects: max(1, b.made.Load()) - 1,
		Slow:       b.slow.Load(),
		Dropped:    b.dropped.Load(),
		Denied:     b.denied.Load(),
	}
}

// Close sends what Send has taken, lets subscriptions finish what they hold
// and disconnects, within five seconds or little more. Stop publishers before closing.
func (b *Bus) Close() {
	b.closeOnce.Do(func() {
		bound, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		close(b.closing)
		select {
		case <-b.sent:
		case <-bound.Done():
		}
		closed := make(chan struct{})
		b.conn.SetClosedHandler(func(*nats.Conn) { close(closed) })
		if err := b.conn.Drain(); err == nil {
			select {
			case <-closed:
			case <-bound.Done():
				b.log.Warn().Msg("closed before everything was flushed")
			}
		}
		b.conn.Close()
		b.refresh(b.conn)
	})
}

// reconnectDelay grows from 50 ms to 2 s over the rounds, with jitter, so that
// a restarted server is found at once and not stampeded.
func reconnectDelay(attempts int) time.Duration {
	d := 2 * time.Second
	if attempts < 6 {
		d = 50 * time.Millisecond << max(0, attempts-1)
	}
	return d/2 + rand.N(d/2)
}

// nextConnect gives a channel that is closed at the next connect.
func (b *Bus) nextConnect() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.connects
}

func (b *Bus) onConnect(c *nats.Conn) {
	b.made.Add(1)
	b.refresh(c)
	b.log.Info().Str("server", c.ConnectedServerName()).Uint64("reconnects", b.Stats().Reconnects).Msg("connected to NATS")
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.connects)
	b.connects = make(chan struct{})
}

func (b *Bus) onDisconnect(c *nats.Conn, err error) {
	b.refresh(c)
	b.calls.lost()
	if err != nil { // nil: closed on purpose
		b.log.Warn().Err(err).Msg("lost the connection to NATS")
	}
}

func (b *Bus) onReconnectError(_ *nats.Conn, err error) {
	if b.nagReconnect.due(10 * time.Second) {
		b.log.Warn().Err(err).Msg("cannot reach NATS; still trying")
	}
}

func (b *Bus) onError(_ *nats.Conn, sub *nats.Subscription, err error) {
	switch {
	case errors.Is(err, nats.ErrPermissionViolation):
		b.denied.Add(1)
		b.calls.denied(err)
		b.log.Error().Err(err).Msg("denied by NATS: check the permissions of this service's user")
	case errors.Is(err, nats.ErrSlowConsumer):
		b.slow.Add(1)
		e := b.log.Error().Err(err)
		if sub != nil {
			e = e.Str("subject", sub.Subject)
		}
		e.Msg("a subscriber fell behind and lost messages")
	default:
		b.log.Warn().Err(err).Msg("NATS reported an error")
	}
}

// nag limits how often something is said.
type nag struct {
	mu   sync.Mutex
	last time.Time
}

// due is true at most once in every.
func (n *nag) due(every time.Duration) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if now := time.Now(); n.last.IsZero() || now.Sub(n.last) >= every {
		n.last = now
		return true
	}
	return false
}

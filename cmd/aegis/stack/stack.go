package stack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/aegisrate/aegisrate/cmd/aegis/upstream"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redisstore"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/embedded"
	"github.com/aegisrate/aegisrate/pkg/lifecycle"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
	"github.com/aegisrate/aegisrate/services/controlplane"
	"github.com/aegisrate/aegisrate/services/edge"
	"github.com/aegisrate/aegisrate/services/healthwatch"
	"github.com/aegisrate/aegisrate/services/settler"
)

const (
	// readyTimeout bounds how long one part may take to come up.
	readyTimeout = 30 * time.Second
	// settleTimeout bounds how long a stop waits for the settler to catch up.
	settleTimeout = 15 * time.Second
	// drainTimeout bounds how long a stop waits for requests under way.
	drainTimeout = 5 * time.Second
	// serviceTimeout bounds how long a service takes to stop; the services' own bounds add up to less.
	serviceTimeout = 20 * time.Second
	// slack is what a part may take to stop beyond what its own bounds add up to.
	slack = 2 * time.Second
)

// Stack is a running AegisRate.
type Stack struct {
	cfg Config

	// Each is set by its part before the next one starts.
	redis        *redisServer
	redisOptions redisstore.Options
	nats         *embedded.Server
	upstream     *upstream.Upstream
	upstreamAddr string
	control      *Node
	healthwatch  *Node
	settler      *Node
	// reused is the version of a policy that was found in the data directory; 0: none was.
	reused uint64

	mu    sync.Mutex
	edges []*Node
	// failed takes the first error of an edge.
	failed chan error

	cancel context.CancelFunc
	done   chan struct{} // closed when everything has stopped; err is set by then
	err    error
}

// Start brings everything up and returns when the edge serves. The end of ctx stops
// the stack, as Stop does. Where something can't start, what did is stopped again.
func Start(ctx context.Context, cfg Config) (*Stack, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := cfg.checkFree(); err != nil {
		return nil, err
	}
	unlock, err := lockDir(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	s := &Stack{cfg: cfg, upstream: upstream.New(), failed: make(chan error, 1), done: make(chan struct{})}
	ctx, s.cancel = context.WithCancel(ctx)
	up := make(chan struct{})
	go func() {
		defer close(s.done)
		defer unlock()
		defer s.cancel()
		s.err = lifecycle.Run(ctx,
			part("redis", 0, s.runRedis),
			part("nats", 0, s.runNATS),
			part("upstream", 0, s.runUpstream),
			part("controlplane", serviceTimeout+slack, s.runControlplane),
			part("healthwatch", serviceTimeout+slack, s.runHealthwatch),
			part("settler", serviceTimeout+slack, s.runSettler),
			// Between the edges' end and the settler's, everything published gets settled.
			part("settled", settleTimeout+slack, s.runSettled),
			part("edges", serviceTimeout+slack, s.runEdges),
			part("up", 0, func(ctx context.Context, ready func()) error {
				ready()
				close(up)
				<-ctx.Done()
				return nil
			}),
		)
	}()
	select {
	case <-up:
		return s, nil
	case <-s.done:
		if s.err == nil {
			s.err = context.Cause(ctx)
		}
		return nil, s.err
	}
}

// Done is closed when the stack has stopped.
func (s *Stack) Done() <-chan struct{} { return s.done }

// Wait waits until the stack has stopped; its error says what failed, or what did not stop in order.
func (s *Stack) Wait() error {
	<-s.done
	return s.err
}

// Stop stops everything in order: edges finish their requests and publish their
// events, the settler settles them, then it, healthwatch and the controlplane end, then
// the sample upstream, NATS and Redis.
func (s *Stack) Stop() error {
	s.cancel()
	return s.Wait()
}

// Abort kills what would outlive this process. It is for a process that exits at once.
func (s *Stack) Abort() {
	if s.redis != nil && s.redis.kill != nil {
		s.redis.kill()
	}
}

// Edges are the edges that run, in the order they were started.
func (s *Stack) Edges() []*Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.edges)
}

// Controlplane, Healthwatch and Settler are the other services.
func (s *Stack) Controlplane() *Node { return s.control }

// Healthwatch is the service that moves multipliers.
func (s *Stack) Healthwatch() *Node { return s.healthwatch }

// Settler is the service that settles costs.
func (s *Stack) Settler() *Node { return s.settler }

// Upstream is the sample upstream, UpstreamAddr where it listens.
func (s *Stack) Upstream() *upstream.Upstream { return s.upstream }

// UpstreamAddr is where the sample upstream listens.
func (s *Stack) UpstreamAddr() string { return s.upstreamAddr }

// NATSURL is where NATS listens.
func (s *Stack) NATSURL() string { return s.nats.URL() }

// Redis says which Redis it is, and where.
func (s *Stack) Redis() (about, addr string) { return s.redis.about, s.redis.addr }

// ReusedPolicy is the version of the policy that was found in the data directory; 0
// says that there was none, and the configured or the sample policy was imported.
func (s *Stack) ReusedPolicy() uint64 { return s.reused }

// part is a component that says itself when the next one may start.
func part(name string, stop time.Duration, run func(ctx context.Context, up func()) error) lifecycle.Component {
	up := make(chan struct{})
	return lifecycle.Component{
		Name: name,
		Stop: stop,
		Run:  func(ctx context.Context) error { return run(ctx, sync.OnceFunc(func() { close(up) })) },
		Ready: func(ctx context.Context) error {
			timeout := time.NewTimer(readyTimeout)
			defer timeout.Stop()
			select {
			case <-up:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			case <-timeout.C:
				return fmt.Errorf("did not come up within %s", readyTimeout)
			}
		},
	}
}

func (s *Stack) runRedis(ctx context.Context, up func()) error {
	r, options, err := s.openRedis(ctx)
	if err != nil {
		return err
	}
	defer r.stop()
	s.redis, s.redisOptions = r, options
	up()
	select {
	case <-ctx.Done():
		return nil
	case err := <-r.died:
		return err
	}
}

func (s *Stack) openRedis(ctx context.Context) (*redisServer, redisstore.Options, error) {
	if s.cfg.Redis == "" {
		r, err := startRedis(ctx, s.cfg.Log)
		if err != nil {
			return nil, redisstore.Options{}, err
		}
		return r, patient(redisstore.Options{Addrs: []string{r.addr}}), nil
	}
	options, err := redisAt(s.cfg.Redis)
	if err != nil {
		return nil, redisstore.Options{}, err
	}
	return &redisServer{addr: options.Addrs[0], about: "the one of --redis", stop: func() {}}, options, nil
}

// redisAt reads redis://[user:password@]host:port, or a bare host:port.
func redisAt(text string) (redisstore.Options, error) {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" {
		u = &url.URL{Scheme: "redis", Host: text}
	}
	if _, _, err := net.SplitHostPort(u.Host); err != nil || u.Scheme != "redis" || (u.Path != "" && u.Path != "/" && u.Path != "/0") || u.RawQuery != "" {
		return redisstore.Options{}, errors.New("--redis: want redis://[user:password@]host:port")
	}
	password, _ := u.User.Password()
	return patient(redisstore.Options{Addrs: []string{u.Host}, Username: u.User.Username(), Password: password}), nil
}

// patient gives Redis more time than a service on a machine of its own would: here one
// machine runs everything, and a stall is a busy machine more often than an outage.
func patient(o redisstore.Options) redisstore.Options {
	o.Timeout, o.PoolTimeout, o.DialTimeout = 250*time.Millisecond, 250*time.Millisecond, time.Second
	return o
}

func (s *Stack) runNATS(ctx context.Context, up func()) error {
	host, port, err := address{"nats-addr", s.cfg.NATSAddr}.split()
	if err != nil {
		return err
	}
	if port == 0 {
		port = -1 // the server's word for "a free one"
	}
	server, err := embedded.Start(embedded.Config{
		StoreDir: filepath.Join(s.cfg.DataDir, "nats"),
		Host:     host,
		Port:     port,
		Log:      s.cfg.Log,
	})
	if err != nil {
		return err
	}
	defer server.Shutdown()
	s.nats = server
	up()
	<-ctx.Done()
	return nil
}

func (s *Stack) runUpstream(ctx context.Context, up func()) error {
	l, err := net.Listen("tcp", s.cfg.UpstreamAddr)
	if err != nil {
		return fmt.Errorf("--upstream-addr: %w", err)
	}
	s.upstreamAddr = l.Addr().String()
	up()
	return telemetry.Serve(ctx, telemetry.NewHTTPServer(s.upstream, s.cfg.Log), l, time.Second)
}

func (s *Stack) runControlplane(ctx context.Context, up func()) error {
	file, err := s.importable(ctx)
	if err != nil {
		return err
	}
	return s.run(ctx, up, &s.control, "controlplane", s.cfg.ControlAdminAddr, func(n *Node, d deps) (service, error) {
		cfg := controlplane.DefaultConfig()
		cfg.Addr = s.cfg.ControlAddr
		cfg.PolicyFile = file
		cfg.RulesDSN = s.cfg.RulesDSN
		cfg.AdminToken = s.cfg.AdminToken
		cfg.AllowTokenlessNATS = s.cfg.AdminToken == ""
		c, err := controlplane.New(cfg, controlplane.Deps{Bus: d.bus, Store: d.store, Log: d.log, Registry: d.registry})
		if err != nil {
			return nil, err
		}
		n.addr = c.Addr
		return c, nil
	})
}

func (s *Stack) runHealthwatch(ctx context.Context, up func()) error {
	return s.run(ctx, up, &s.healthwatch, "healthwatch", s.cfg.HealthwatchAdminAddr, func(_ *Node, d deps) (service, error) {
		return healthwatch.New(healthwatch.DefaultConfig("healthwatch-1"), healthwatch.Deps{Bus: d.bus, Log: d.log, Registry: d.registry})
	})
}

func (s *Stack) runSettler(ctx context.Context, up func()) error {
	return s.run(ctx, up, &s.settler, "settler", s.cfg.SettlerAdminAddr, func(n *Node, d deps) (service, error) {
		c, err := settler.New(settler.DefaultConfig(), settler.Deps{Bus: d.bus, Store: d.store, Log: d.log, Registry: d.registry})
		if err != nil {
			return nil, err
		}
		n.flush = c.Flush
		return c, nil
	})
}

// runSettled waits, when its turn to stop comes, until what the edges published is settled.
func (s *Stack) runSettled(ctx context.Context, up func()) error {
	up()
	<-ctx.Done()
	if s.settler.stopped() {
		return nil
	}
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	return s.settler.flush(bound)
}

// runEdges runs the first edge, and stops this and all that StartEdge added.
func (s *Stack) runEdges(ctx context.Context, up func()) error {
	if _, err := s.StartEdge(ctx, EdgeConfig{Name: "edge-1", Addr: s.cfg.EdgeAddr, AdminAddr: s.cfg.EdgeAdminAddr}); err != nil {
		return err
	}
	up()
	var failure error
	select {
	case <-ctx.Done():
	case failure = <-s.failed:
	}
	errs := make(chan error)
	edges := s.Edges()
	for _, e := range edges {
		go func() { errs <- e.Stop() }()
	}
	for range edges {
		failure = errors.Join(failure, <-errs)
	}
	return failure
}

// EdgeConfig is what differs between the edges of a stack.
type EdgeConfig struct {
	// Name is the edge's id. An edge that starts under the name of one that was stopped finds its policy on disk.
	Name            string
	Addr, AdminAddr string
}

// StartEdge adds an edge to a running stack and returns when it serves.
func (s *Stack) StartEdge(ctx context.Context, cfg EdgeConfig) (*Node, error) {
	version, err := s.policyVersion(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", cfg.Name, err)
	}
	n, err := s.start(ctx, "edge", cfg.AdminAddr, func(n *Node, d deps) (service, error) {
		c := edge.DefaultConfig()
		c.ID = cfg.Name
		c.Addr = cfg.Addr
		c.DataDir = filepath.Join(s.cfg.DataDir, cfg.Name)
		c.DrainTimeout = drainTimeout
		c.RulesTimeout = time.Second // as patient as with Redis
		e, err := edge.New(c, edge.Deps{Bus: d.bus, Store: d.store, Ping: d.store.Ping, Counter: d.store.Counter, Log: d.log, Registry: d.registry})
		if err != nil {
			return nil, err
		}
		n.addr = e.Addr
		return &informed{Service: e, version: version}, nil
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", cfg.Name, err)
	}
	s.mu.Lock()
	s.edges = append(s.edges, n)
	s.mu.Unlock()
	go func() {
		<-n.done
		s.mu.Lock()
		s.edges = slices.DeleteFunc(s.edges, func(e *Node) bool { return e == n })
		s.mu.Unlock()
		if n.err != nil && !n.stopping() {
			select {
			case s.failed <- fmt.Errorf("%s: %w", cfg.Name, n.err):
			default:
			}
		}
	}()
	return n, nil
}

// informed is an edge that is not ready before it has heard of the policy that was in
// force when it started: the one that it kept on disk may point to where nobody listens any more.
type informed struct {
	*edge.Service
	version uint64
}

func (e *informed) Ready(ctx context.Context) (any, error) {
	detail, err := e.Service.Ready(ctx)
	if d, ok := detail.(edge.Detail); err == nil && ok && d.PolicyVersion < e.version {
		err = fmt.Errorf("the edge obeys policy version %d, %d is in force", d.PolicyVersion, e.version)
	}
	return detail, err
}

// connect gives a service a connection of its own, as it has in a process of its own.
func (s *Stack) connect(ctx context.Context, name string) (*bus.Bus, error) {
	return bus.Connect(ctx, bus.Config{Name: name, InProcess: s.nats}, s.cfg.Log.With().Str("service", name).Logger())
}

package stack

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/rs/zerolog"
)

// redisServer is a Redis that lives and dies with the stack.
type redisServer struct {
	addr string
	// about says what it is, for people.
	about string
	// died gives the reason when it ends without having been stopped.
	died <-chan error
	stop func()
	// kill ends it at once, where it is a process.
	kill func()
}

// startRedis starts a private redis-server where there is one on PATH, else the
// embedded one. Neither keeps anything on disk: balances start full with the process.
func startRedis(ctx context.Context, log zerolog.Logger) (*redisServer, error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return startMiniredis()
	}
	// The port is free when it is chosen and may be taken when the server binds it.
	for range 5 {
		s, err := startRedisProcess(ctx, path, log)
		if !errors.Is(err, errPortTaken) {
			return s, err
		}
	}
	return nil, fmt.Errorf("%s found no free port on 127.0.0.1 in five attempts", path)
}

var errPortTaken = errors.New("the port was taken meanwhile")

func startRedisProcess(ctx context.Context, path string, log zerolog.Logger) (*redisServer, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	cmd := exec.Command(path,
		"--bind", "127.0.0.1", "--port", strconv.Itoa(port), "--save", "", "--appendonly", "no",
		"--daemonize", "no", "--maxmemory", "256mb", "--maxmemory-policy", "volatile-ttl", "--loglevel", "notice")
	cmd.SysProcAttr = ownGroup()
	// Its sockets and files are none of the caller's folder's business.
	cmd.Dir = "/"
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = cmd.Stdout
	p := &process{cmd: cmd, log: log, exited: make(chan struct{}), died: make(chan error, 1)}
	started := make(chan error, 1)
	go p.run(out, started)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s: %w", path, err)
	}
	version, err := p.awaitReady(ctx, addr)
	if err != nil {
		p.stop()
		return nil, err
	}
	return &redisServer{
		addr:  addr,
		about: fmt.Sprintf("private redis-server %s (%s, pid %d)", version, path, cmd.Process.Pid),
		died:  p.died,
		stop:  p.stop,
		kill:  func() { p.cmd.Process.Kill() }, // an error means that it has ended
	}, nil
}

// process is a child whose end is noticed and that never outlives this process.
type process struct {
	cmd    *exec.Cmd
	log    zerolog.Logger
	exited chan struct{}
	died   chan error

	mu       sync.Mutex
	stopping bool
	last     string // the last line of output, as the likely reason for an early end
}

// run starts the child and waits for it, all on one thread: the kernel kills the
// child when the thread that started it ends, which must not come before the process's end.
func (p *process) run(out io.Reader, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line == "" {
			continue
		}
		p.log.Debug().Str("component", "redis-server").Msg(line)
		p.mu.Lock()
		p.last = line
		p.mu.Unlock()
	}
	err = p.cmd.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.stopping {
		p.died <- fmt.Errorf("redis-server (pid %d) ended: %w; it last said %q", p.cmd.Process.Pid, cause(err), p.last)
	}
	close(p.exited)
}

func cause(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// stop ends the child, at the latest after five seconds. Nothing of it is kept, so there is nothing to wait for.
func (p *process) stop() {
	p.mu.Lock()
	p.stopping = true
	p.mu.Unlock()
	// Where the platform knows no SIGTERM the kill below does the work.
	p.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.NewTimer(5 * time.Second)
	defer timer.Stop()
	select {
	case <-p.exited:
	case <-timer.C:
		p.cmd.Process.Kill() // an error means that it has ended
		<-p.exited
	}
}

// awaitReady waits until the child, and no other server, answers on addr, and gives its version.
func (p *process) awaitReady(ctx context.Context, addr string) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for {
		info, err := info(ctx, addr)
		if err == nil {
			if field(info, "process_id") != strconv.Itoa(p.cmd.Process.Pid) {
				return "", errPortTaken
			}
			return field(info, "redis_version"), nil
		}
		select {
		case <-p.exited:
			err := <-p.died
			if strings.Contains(err.Error(), "bind") || strings.Contains(err.Error(), "in use") || strings.Contains(err.Error(), "listening port") {
				return "", fmt.Errorf("%w: %w", errPortTaken, err)
			}
			return "", err
		case <-ctx.Done():
			return "", fmt.Errorf("redis-server (pid %d) does not answer on %s: %w", p.cmd.Process.Pid, addr, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// info asks a server that may not listen yet about itself.
func info(ctx context.Context, addr string) (string, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return "", err
	}
	conn.Close()
	client := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1, DialerRetries: 1})
	defer client.Close()
	return client.Info(ctx, "server").Result()
}

// field reads one field of an INFO answer.
func field(info, name string) string {
	_, rest, _ := strings.Cut(info, name+":")
	value, _, _ := strings.Cut(rest, "\r\n")
	return value
}

// startMiniredis starts the embedded stand-in. It expires keys only when it is told
// that time has passed, so somebody must tell it.
func startMiniredis() (*redisServer, error) {
	m := miniredis.NewMiniRedis()
	if err := m.StartAddr("127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("starting the embedded Redis: %w", err)
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		last := time.Now()
		for {
			select {
			case <-tick.C:
				now := time.Now()
				m.FastForward(now.Sub(last))
				last = now
			case <-stop:
				return
			}
		}
	}()
	return &redisServer{
		addr:  m.Addr(),
		about: "embedded (miniredis; install redis-server to run on a real one)",
		stop: func() {
			close(stop)
			<-stopped
			m.Close()
		},
	}, nil
}

// freePort is a port that nobody listens on now.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

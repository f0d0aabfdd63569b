package redistest

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// EnvURL names the environment variable with the URL of a Redis to use, redis://host:port/db.
const EnvURL = "AEGIS_TEST_REDIS_URL"

// startTimeout bounds the wait for a server to answer.
const startTimeout = 20 * time.Second

// Server is a running Redis.
type Server struct {
	// Addr is its host:port.
	Addr string
	// Client is a plain client for looking at what is stored.
	Client *redis.Client

	proc      *exec.Cmd
	container string
	run       func(t testing.TB)
}

// Start runs a Redis until the test ends. args are further arguments of redis-server.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	s := &Server{}
	switch {
	case os.Getenv(EnvURL) != "" && len(args) == 0:
		opt, err := redis.ParseURL(os.Getenv(EnvURL))
		if err != nil {
			t.Fatalf("%s: %v", EnvURL, err)
		}
		s.Addr = opt.Addr
		s.Client = redis.NewClient(opt)
		s.await(t)
		if err := s.Client.FlushDB(t.Context()).Err(); err != nil {
			t.Fatalf("%s: flush: %v", EnvURL, err)
		}
		t.Cleanup(func() { s.Client.Close() })
		return s
	case have("redis-server"):
		dir := t.TempDir()
		s.Addr = FreeAddr(t)
		host, port := s.hostPort(t)
		line := append([]string{"--bind", host, "--port", port, "--dir", dir, "--save", "", "--daemonize", "no"}, args...)
		s.run = func(t testing.TB) { s.startProcess(t, line) }
	case have("docker"):
		s.run = func(t testing.TB) { s.startContainer(t, args) }
	default:
		t.Fatalf("no Redis for this test: set %s, or install redis-server (apt-get install redis-server), or docker", EnvURL)
	}
	s.start(t)
	return s
}

// start runs the server, until the test ends, and waits until it answers.
func (s *Server) start(t testing.TB) {
	t.Helper()
	s.run(t)
	s.listening(t)
	s.Client = redis.NewClient(&redis.Options{Addr: s.Addr, DialerRetries: 1})
	t.Cleanup(func() {
		s.Client.Close()
		s.Kill(t)
	})
	s.await(t)
}

func (s *Server) hostPort(t testing.TB) (host, port string) {
	t.Helper()
	host, port, err := net.SplitHostPort(s.Addr)
	if err != nil {
		t.Fatal(err)
	}
	return host, port
}

// FreeAddr is a loopback address that nothing listens on. Cluster nodes need the port 10,000 above it too,
// so the port is below 50,000.
func FreeAddr(t testing.TB) string {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr := l.Addr().(*net.TCPAddr)
		l.Close()
		if addr.Port < 50_000 {
			return addr.String()
		}
	}
	t.Fatal("no free port below 50,000")
	return ""
}

func have(command string) bool {
	_, err := exec.LookPath(command)
	return err == nil
}

func (s *Server) startProcess(t testing.TB, line []string) {
	t.Helper()
	s.proc = exec.Command("redis-server", line...)
	var out bytes.Buffer
	s.proc.Stdout, s.proc.Stderr = &out, &out
	if err := s.proc.Start(); err != nil {
		t.Fatalf("redis-server: %v", err)
	}
}

func (s *Server) startContainer(t testing.TB, args []string) {
	t.Helper()
	line := append([]string{"run", "--detach", "--rm", "--publish", "127.0.0.1::6379", "redis", "redis-server", "--save", ""}, args...)
	out, err := exec.Command("docker", line...).CombinedOutput()
	if err != nil {
		t.Fatalf("docker run redis: %v: %s", err, out)
	}
	s.container = strings.TrimSpace(string(out))
	out, err = exec.Command("docker", "port", s.container, "6379/tcp").CombinedOutput()
	if err != nil {
		t.Fatalf("docker port: %v: %s", err, out)
	}
	s.Addr, _, _ = strings.Cut(strings.TrimSpace(string(out)), "\n")
}

// listening waits until the server can be connected to.
func (s *Server) listening(t testing.TB) {
	t.Helper()
	Await(t, "redis at "+s.Addr+" to listen", func() error {
		c, err := net.Dial("tcp", s.Addr)
		if err == nil {
			c.Close()
		}
		return err
	})
}

// await waits until the server answers.
func (s *Server) await(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	Await(t, "redis at "+s.Addr+" to answer", func() error { return s.Client.Ping(ctx).Err() })
}

// Await polls until check returns nil, and fails the test when it does not in time.
func Await(t testing.TB, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(startTimeout)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %v for %s: %v", startTimeout, what, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// Stop stalls the server: connections stay open and nothing answers. Cont ends that.
func (s *Server) Stop(t testing.TB) { s.signal(t, syscall.SIGSTOP, "pause") }

// Cont lets a stopped server go on.
func (s *Server) Cont(t testing.TB) { s.signal(t, syscall.SIGCONT, "unpause") }

func (s *Server) signal(t testing.TB, sig syscall.Signal, docker string) {
	t.Helper()
	var err error
	switch {
	case s.proc != nil:
		err = s.proc.Process.Signal(sig)
	case s.container != "":
		err = exec.Command("docker", docker, s.container).Run()
	default:
		err = fmt.Errorf("the Redis of %s is not this test's to stop", EnvURL)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Kill ends the server at once, as kill -9 does. It does nothing where it is dead already.
func (s *Server) Kill(t testing.TB) {
	t.Helper()
	switch {
	case s.proc != nil:
		s.proc.Process.Kill() // fails only where it is dead already
		s.proc.Wait()         // its error is that it was killed
		s.proc = nil
	case s.container != "":
		if out, err := exec.Command("docker", "rm", "--force", s.container).CombinedOutput(); err != nil {
			t.Errorf("docker rm: %v: %s", err, out)
		}
		s.container = ""
	}
}

// Restart starts a killed server again, on the same address and directory.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	if s.proc != nil || s.container != "" || s.run == nil {
		t.Fatal("only a killed server of this test's own can be restarted")
	}
	s.run(t)
	s.listening(t)
	s.await(t)
}

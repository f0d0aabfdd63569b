// Package pgtest gives tests a real PostgreSQL server of their own, stopped and started at will.
package pgtest

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// startTimeout bounds the wait for a server to answer.
const startTimeout = 60 * time.Second

// Server is a running PostgreSQL with one superuser, "aegis".
type Server struct {
	DSN  string
	Addr string // host:port
	bin  string
	dir  string
	port int
	cred *syscall.Credential // PostgreSQL refuses root
	proc *exec.Cmd
}

// Start runs a server until the test ends.
func Start(t testing.TB) *Server {
	t.Helper()
	s := &Server{bin: binaries(t), dir: t.TempDir()}
	if os.Getuid() == 0 {
		s.cred = unprivileged(t)
		// The test's directories are root's alone.
		for d := s.dir; d != filepath.Dir(os.TempDir()) && d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
			if err := os.Chmod(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chown(s.dir, int(s.cred.Uid), int(s.cred.Gid)); err != nil {
			t.Fatal(err)
		}
	}
	data := filepath.Join(s.dir, "data")
	init := s.command("initdb", "--pgdata", data, "--username", "aegis", "--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync")
	if out, err := init.CombinedOutput(); err != nil {
		t.Fatalf("initdb: %v: %s", err, out)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.port = l.Addr().(*net.TCPAddr).Port
	l.Close()
	s.Addr = l.Addr().String()
	s.DSN = "postgres://aegis@" + s.Addr + "/postgres?sslmode=disable"
	t.Cleanup(func() { s.Stop(t) })
	s.Start(t)
	return s
}

// Start starts a stopped server again.
func (s *Server) Start(t testing.TB) {
	t.Helper()
	s.proc = s.command("postgres", "-D", filepath.Join(s.dir, "data"), "-h", "127.0.0.1", "-p", strconv.Itoa(s.port), "-k", s.dir,
		"-c", "fsync=off", "-c", "shared_buffers=32MB", "-c", "max_connections=60")
	var out bytes.Buffer
	s.proc.Stdout, s.proc.Stderr = &out, &out
	if err := s.proc.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(startTimeout); ; time.Sleep(20 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		c, err := pgx.Connect(ctx, s.DSN)
		cancel()
		if err == nil {
			c.Close(context.Background())
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("PostgreSQL does not answer: %v\n%s", err, out.String())
		}
	}
}

// Stop ends the server at once; what was committed is there when it starts again.
func (s *Server) Stop(t testing.TB) {
	t.Helper()
	if s.proc == nil {
		return
	}
	if err := s.proc.Process.Signal(syscall.SIGQUIT); err != nil {
		t.Error(err)
	}
	_ = s.proc.Wait() // its error is that it was ended
	s.proc = nil
}

// Exec runs SQL, as somebody with a shell would.
func (s *Server) Exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	c, err := pgx.Connect(t.Context(), s.DSN)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	if _, err := c.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

func (s *Server) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin, name), args...)
	cmd.Dir = s.dir
	cmd.Env = []string{"PATH=" + s.bin + ":/usr/bin:/bin", "HOME=" + s.dir, "LC_ALL=C"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.cred, Setpgid: true}
	return cmd
}

// binaries is the folder of the newest PostgreSQL: on PATH, or where Debian puts it.
func binaries(t testing.TB) string {
	t.Helper()
	if p, err := exec.LookPath("initdb"); err == nil {
		return filepath.Dir(p)
	}
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if err != nil || len(found) == 0 {
		t.Fatal("no PostgreSQL for this test: install postgresql (apt-get install postgresql)")
	}
	version := func(p string) int {
		n, _ := strconv.Atoi(strings.Split(p, "/")[4])
		return n
	}
	return filepath.Dir(slices.MaxFunc(found, func(a, b string) int { return version(a) - version(b) }))
}

func unprivileged(t testing.TB) *syscall.Credential {
	t.Helper()
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err1 == nil && err2 == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		}
	}
	t.Fatal("PostgreSQL does not run as root, and there is no user postgres or nobody")
	return nil
}

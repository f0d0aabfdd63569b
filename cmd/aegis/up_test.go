package main_test

import (
	"bufio"
	"bytes"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// build makes the real binary once; the tests below are about the process.
var build = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "aegis-test-")
	if err != nil {
		return "", err
	}
	bin := filepath.Join(dir, "aegis")
	out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput()
	if err != nil {
		return "", &buildError{out, err}
	}
	return bin, nil
})

type buildError struct {
	out []byte
	err error
}

func (e *buildError) Error() string { return e.err.Error() + "\n" + string(e.out) }

func TestMain(m *testing.M) {
	code := m.Run()
	if bin, err := build(); err == nil {
		os.RemoveAll(filepath.Dir(bin))
	}
	os.Exit(code)
}

func binary(t *testing.T) string {
	t.Helper()
	bin, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

// running is an aegis up in a process group of its own, as a terminal has it.
type running struct {
	cmd    *exec.Cmd
	exited chan error
	mu     sync.Mutex
	lines  []string
}

func up(t *testing.T, args ...string) *running {
	t.Helper()
	args = append([]string{"up", "--data-dir", t.TempDir()}, args...)
	for _, flag := range []string{"edge", "control", "nats", "upstream", "edge-admin", "settler-admin", "healthwatch-admin", "control-admin"} {
		args = append(args, "--"+flag+"-addr=127.0.0.1:0")
	}
	cmd := exec.Command(binary(t), args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := &running{cmd: cmd, exited: make(chan error, 1)}
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			r.mu.Lock()
			r.lines = append(r.lines, lines.Text())
			r.mu.Unlock()
		}
		r.exited <- cmd.Wait()
	}()
	t.Cleanup(func() {
		cmd.Process.Kill() // an error means that it has ended
		if t.Failed() {
			t.Log(r.output())
		}
	})
	r.await(t, "Ctrl-C stops.")
	return r
}

func (r *running) output() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.lines, "\n")
}

func (r *running) await(t *testing.T, text string) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for !strings.Contains(r.output(), text) {
		if time.Now().After(deadline) {
			t.Fatalf("it does not say %q:\n%s", text, r.output())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// interrupt is Ctrl-C: the terminal sends it to the whole group.
func (r *running) interrupt(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(-r.cmd.Process.Pid, syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
}

func (r *running) exit(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.exited:
		return err
	case <-time.After(60 * time.Second):
		t.Fatal("it does not end")
		return nil
	}
}

// checkRedisGone holds that no redis-server outlives the process; an embedded one cannot.
func (r *running) checkRedisGone(t *testing.T) {
	t.Helper()
	m := regexp.MustCompile(`redis-server .* pid (\d+)\)`).FindStringSubmatch(r.output())
	if m == nil {
		if !strings.Contains(r.output(), "embedded") {
			t.Errorf("it does not say which Redis it runs on:\n%s", r.output())
		}
		return
	}
	pid, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); syscall.Kill(pid, 0) == nil; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("redis-server %d outlives it", pid)
		}
	}
}

func TestUpServesAndStopsOnInterrupt(t *testing.T) {
	t.Parallel()
	r := up(t)
	urls := regexp.MustCompile(`curl .*?(http://[0-9.:]+/[a-z/]+)`).FindAllStringSubmatch(r.output(), -1)
	if len(urls) != 4 {
		t.Fatalf("it names %d curl lines to try, want 4:\n%s", len(urls), r.output())
	}
	res, err := http.Get(urls[0][1])
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusOK || res.Header.Get("RateLimit-Limit") != "20" {
		t.Errorf("GET %s: %d, %v", urls[0][1], res.StatusCode, res.Header)
	}
	r.interrupt(t)
	if err := r.exit(t); err != nil {
		t.Errorf("it ends with %v, want exit status 0", err)
	}
	if !strings.Contains(r.output(), "everything is settled") {
		t.Error("it does not say that everything is settled")
	}
	r.checkRedisGone(t)
}

func TestUpEndsAtOnceOnASecondInterrupt(t *testing.T) {
	t.Parallel()
	r := up(t)
	// A request under way, so that stopping takes a while.
	slow := regexp.MustCompile(`edge +(http://[0-9.:]+)`).FindStringSubmatch(r.output())[1] + "/api/slow?ms=60000"
	go func() {
		if res, err := http.Get(slow); err == nil { // it is cut off: that is the point
			res.Body.Close()
		}
	}()
	admin := regexp.MustCompile(`metrics on (http://[0-9.:]+)`).FindStringSubmatch(r.output())[1]
	awaitMetric(t, admin+"/metrics", `tier="green"`)
	r.interrupt(t)
	r.await(t, "Stopping")
	start := time.Now()
	r.interrupt(t)
	if err := r.exit(t); err == nil {
		t.Error("an aborted stop ends with exit status 0")
	}
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("it took %s to end at once", took)
	}
	r.checkRedisGone(t)
}

// TestUpKilledTakesRedisAlong holds that even kill -9 leaves no Redis behind (on Linux).
func TestUpKilledTakesRedisAlong(t *testing.T) {
	t.Parallel()
	r := up(t)
	if err := r.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	r.exit(t)
	r.checkRedisGone(t)
}

func TestCommandLine(t *testing.T) {
	t.Parallel()
	invalid := filepath.Join(t.TempDir(), "invalid.yaml")
	if err := os.WriteFile(invalid, []byte("routes:\n  fast:\n    path: /api/fast\n    capacity: -1\nsurprise: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"version"}, 0, "aegis dev"},
		{[]string{"--help"}, 0, "up "},
		{[]string{"up", "--help"}, 0, "--edge-addr"},
		{[]string{"validate", "../../deploy/policy.example.yaml"}, 0, "valid (5 routes"},
		{[]string{"validate", invalid}, 3, "routes.fast.capacity (line 4)"},
		{[]string{"validate", invalid}, 3, "surprise (line 5)"},
		{[]string{"validate", "absent.yaml"}, 1, "absent.yaml"},
		{[]string{"policy", "example"}, 0, "algorithm: token_bucket"},
		{[]string{"healthcheck", "http://127.0.0.1:1/healthz"}, 1, "healthcheck"},
		{[]string{"up", "--edge-addr", "nonsense"}, 2, "--edge-addr"},
		{[]string{"up", "--surprise"}, 2, "unknown flag --surprise"},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(binary(t), c.args...)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			cmd.Run() // its status is looked at below
			if status := cmd.ProcessState.ExitCode(); status != c.status || !strings.Contains(out.String(), c.says) {
				t.Errorf("exit status %d, want %d, saying %q; it says:\n%s", status, c.status, c.says, &out)
			}
		})
	}
}

func awaitMetric(t *testing.T, url, text string) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if res, err := http.Get(url); err == nil {
			var body bytes.Buffer
			body.ReadFrom(res.Body)
			res.Body.Close()
			for line := range strings.Lines(body.String()) {
				if strings.Contains(line, text) && !strings.HasSuffix(strings.TrimSpace(line), " 0") {
					return
				}
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s shows no %s", url, text)
		}
	}
}

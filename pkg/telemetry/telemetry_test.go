package telemetry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/telemetry"
)

func TestLogger(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log, err := telemetry.NewLogger(&out, "warn", "json", "edge")
	if err != nil {
		t.Fatal(err)
	}
	log.Info().Msg("quiet")
	log.Warn().Msg("loud")
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil || line["message"] != "loud" || line["service"] != "edge" || line["time"] == nil {
		t.Errorf("got %q, %v", out.String(), err)
	}
	out.Reset()
	if log, err = telemetry.NewLogger(&out, "debug", "console", "edge"); err != nil {
		t.Fatal(err)
	}
	log.Debug().Msg("for people")
	if !strings.Contains(out.String(), "for people") || json.Valid(out.Bytes()) {
		t.Errorf("got %q", out.String())
	}
	for _, bad := range [][2]string{{"loud", "json"}, {"info", "xml"}, {"", "json"}} {
		if _, err := telemetry.NewLogger(io.Discard, bad[0], bad[1], "edge"); err == nil || !strings.HasPrefix(err.Error(), "log-") {
			t.Errorf("%v: got %v, want the flag named", bad, err)
		}
	}
}

// admin runs an Admin on a free port until the test ends.
func admin(t *testing.T) (*telemetry.Admin, *telemetry.Registry) {
	t.Helper()
	reg := telemetry.NewRegistry("edge")
	a := telemetry.NewAdmin("127.0.0.1:0", reg, zerolog.Nop())
	background(t, a.Run)
	if err := a.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	return a, reg
}

// background runs f until the test ends, and wants no error of it.
func background(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestAdmin(t *testing.T) {
	t.Parallel()
	a, reg := admin(t)
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "aegis_test_total", Help: "For a test."})
	reg.MustRegister(counter)
	counter.Inc()
	var mu sync.Mutex
	var fault error
	a.AddReadiness("redis", func(context.Context) (any, error) {
		mu.Lock()
		defer mu.Unlock()
		return map[string]any{"addr": "127.0.0.1:6379"}, fault
	})
	url := "http://" + a.Addr()

	if status, body := get(t, url+"/healthz"); status != 200 || body != "ok\n" {
		t.Errorf("healthz: %d %q", status, body)
	}
	status, body := get(t, url+"/readyz")
	var answer struct {
		Ready    bool
		Draining bool
		Checks   map[string]struct {
			OK     bool
			Detail map[string]string
			Error  string
		}
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil {
		t.Fatal(err)
	}
	if c := answer.Checks["redis"]; status != 200 || !answer.Ready || !c.OK || c.Detail["addr"] != "127.0.0.1:6379" || c.Error != "" {
		t.Errorf("readyz: %d %s", status, body)
	}
	if status, body := get(t, url+"/metrics"); status != 200 || !strings.Contains(body, `aegis_test_total{service="edge"} 1`) || !strings.Contains(body, "go_goroutines{") {
		t.Errorf("metrics: %d, %d bytes", status, len(body))
	}
	if err := telemetry.Healthcheck(url + "/readyz"); err != nil {
		t.Error(err)
	}

	mu.Lock()
	fault = errors.New("connection refused")
	mu.Unlock()
	status, body = get(t, url+"/readyz")
	if err := json.Unmarshal([]byte(body), &answer); err != nil {
		t.Fatal(err)
	}
	if c := answer.Checks["redis"]; status != 503 || answer.Ready || c.OK || c.Error != "connection refused" {
		t.Errorf("readyz with a fault: %d %s", status, body)
	}
	if err := telemetry.Healthcheck(url + "/readyz"); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("healthcheck: got %v, want what is wrong", err)
	}
	if status, _ := get(t, url+"/healthz"); status != 200 {
		t.Errorf("healthz with a fault: %d; a restart would not help", status)
	}
}

func TestReadinessIsBounded(t *testing.T) {
	t.Parallel()
	a, _ := admin(t)
	forever := make(chan struct{})
	t.Cleanup(func() { close(forever) })
	for i := range 3 {
		a.AddReadiness(fmt.Sprint("stuck", i), func(context.Context) (any, error) { <-forever; return nil, nil })
	}
	began := time.Now()
	status, body := get(t, "http://"+a.Addr()+"/readyz")
	if took := time.Since(began); status != 503 || strings.Count(body, "no answer within 1s") != 3 || took > 3*time.Second {
		t.Errorf("got %d %s after %v, want three probes timed out together", status, body, took)
	}
}

func TestDrain(t *testing.T) {
	t.Parallel()
	a, _ := admin(t)
	url := "http://" + a.Addr()
	if status, body := get(t, url+"/readyz"); status != 200 {
		t.Errorf("without probes: %d %s", status, body)
	}
	a.Drain()
	if status, body := get(t, url+"/readyz"); status != 503 || !strings.Contains(body, `"draining": true`) {
		t.Errorf("draining: %d %s", status, body)
	}
	if status, _ := get(t, url+"/healthz"); status != 200 {
		t.Errorf("healthz while draining: %d", status)
	}
}

func TestAdminPortTaken(t *testing.T) {
	t.Parallel()
	a, _ := admin(t)
	second := telemetry.NewAdmin(a.Addr(), telemetry.NewRegistry("edge"), zerolog.Nop())
	if err := second.Run(t.Context()); err == nil || !strings.HasPrefix(err.Error(), "admin-addr: ") {
		t.Errorf("got %v, want the flag named", err)
	}
}

// serve runs a handler on the shared set-up until the test ends.
func serve(t *testing.T, h http.HandlerFunc, opts ...telemetry.ServerOption) (addr string) {
	t.Helper()
	ln := listen(t)
	s := telemetry.NewHTTPServer(h, zerolog.Nop(), opts...)
	background(t, func(ctx context.Context) error { return telemetry.Serve(ctx, s, ln, time.Second) })
	return ln.Addr().String()
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

func TestOversizedHeader(t *testing.T) {
	t.Parallel()
	addr := serve(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, len(r.Header.Get("X-Big"))) })
	for size, want := range map[int]int{30 << 10: 200, 37 << 10: 431, 1 << 20: 431} {
		req, err := http.NewRequest("GET", "http://"+addr, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Big", strings.Repeat("x", size))
		resp, err := http.DefaultTransport.RoundTrip(req)
		if err != nil && size > 512<<10 {
			continue // the server may hang up while the rest of the head is still on its way
		}
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("a header of %d bytes: %d, want %d", size, resp.StatusCode, want)
		}
	}
}

// TestSlowHeader sends a head byte by byte for longer than allowed (slowloris).
func TestSlowHeader(t *testing.T) {
	t.Parallel()
	addr := serve(t, func(http.ResponseWriter, *http.Request) {})
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\n")); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := conn.SetReadDeadline(began.Add(15 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(conn); err != nil {
		t.Errorf("the server did not hang up: %v", err)
	}
	if took := time.Since(began); took < 4*time.Second || took > 10*time.Second {
		t.Errorf("hung up after %v, want 5 s", took)
	}
}

func TestH2C(t *testing.T) {
	t.Parallel()
	h := func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Proto) }
	client := &http.Client{Transport: &http.Transport{Protocols: new(http.Protocols)}}
	client.Transport.(*http.Transport).Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(client.CloseIdleConnections)

	resp, err := client.Get("http://" + serve(t, h, telemetry.H2C()))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "HTTP/2.0" {
		t.Errorf("got %q, %v", body, err)
	}
	if status, body := get(t, "http://"+serve(t, h, telemetry.H2C())); status != 200 || body != "HTTP/1.1" {
		t.Errorf("HTTP/1.1 beside it: %d %q", status, body)
	}
	if resp, err := client.Get("http://" + serve(t, h)); err == nil {
		resp.Body.Close()
		t.Error("HTTP/2 without TLS was accepted by a server that does not offer it")
	}
}

// TestServeDrains ends a server with a request in flight: it may finish within
// the time to drain, and is cut after it.
func TestServeDrains(t *testing.T) {
	t.Parallel()
	for name, drain := range map[string]time.Duration{"finished": 10 * time.Second, "cut": 50 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			arrived, release := make(chan struct{}), make(chan struct{})
			var out lockedBuffer
			s := telemetry.NewHTTPServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				close(arrived)
				select {
				case <-release:
				case <-r.Context().Done():
				}
				fmt.Fprint(w, "whole")
			}), zerolog.New(&out))
			ln := listen(t)
			ctx, cancel := context.WithCancel(t.Context())
			served := make(chan error, 1)
			go func() { served <- telemetry.Serve(ctx, s, ln, drain) }()
			answered := make(chan string, 1)
			go func() {
				resp, err := http.Get("http://" + ln.Addr().String())
				if err != nil {
					answered <- "cut"
					return
				}
				defer resp.Body.Close()
				body, _ := io.ReadAll(resp.Body)
				answered <- string(body)
			}()
			<-arrived
			cancel()
			if name == "finished" {
				// New connections are refused while the old one goes on.
				for refused := false; !refused; {
					conn, err := net.Dial("tcp", ln.Addr().String())
					if refused = err != nil; !refused {
						conn.Close()
					}
				}
				close(release)
			}
			want := map[string]string{"finished": "whole", "cut": "cut"}[name]
			if got := <-answered; got != want {
				t.Errorf("the client got %q, want %q", got, want)
			}
			if err := <-served; err != nil {
				t.Error(err)
			}
			if cut := strings.Contains(out.String(), "cut off"); cut != (name == "cut") {
				t.Errorf("log: %q", out.String())
			}
		})
	}
}

func TestServeFails(t *testing.T) {
	t.Parallel()
	ln := listen(t)
	ln.Close()
	s := telemetry.NewHTTPServer(http.NotFoundHandler(), zerolog.Nop())
	if err := telemetry.Serve(t.Context(), s, ln, time.Second); err == nil {
		t.Error("serving on a closed listener was no error")
	}
}

func TestHealthcheckWithoutServer(t *testing.T) {
	t.Parallel()
	ln := listen(t)
	ln.Close()
	if err := telemetry.Healthcheck("http://" + ln.Addr().String() + "/healthz"); err == nil {
		t.Error("a process that is not there is healthy")
	}
}

// TestHandlerPanic shows that a panicking handler is logged and kills nothing.
func TestHandlerPanic(t *testing.T) {
	t.Parallel()
	var out lockedBuffer
	s := telemetry.NewHTTPServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("boom") }), zerolog.New(&out))
	ln := listen(t)
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { defer close(ended); _ = telemetry.Serve(ctx, s, ln, time.Second) }()
	if resp, err := http.Get("http://" + ln.Addr().String()); err == nil {
		resp.Body.Close()
		t.Errorf("got %s", resp.Status)
	}
	cancel()
	<-ended
	if !strings.Contains(out.String(), "boom") || !strings.Contains(out.String(), `"component":"http"`) {
		t.Errorf("log: %q", out.String())
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

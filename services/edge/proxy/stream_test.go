package proxy_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// 413 comes before any charge where the length is declared, and in the middle where it is not.
func TestHugeBodyIsRefused(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 0.001", "max_body_bytes: 1000")})

	res, body := r.do(r.request(http.MethodPost, "/api", bytes.NewReader(make([]byte, 1001))))
	problemOf(t, res, body, 413)
	r.noEvent()

	res, _ = r.do(r.request(http.MethodPost, "/api", bytes.NewReader(make([]byte, 1000))))
	if res.StatusCode != 200 || res.Header.Get("RateLimit-Remaining") != "4" {
		t.Errorf("a body at the bound: %d, remaining %s; want nothing charged before", res.StatusCode, res.Header.Get("RateLimit-Remaining"))
	}
	r.event()

	res, body = r.do(r.request(http.MethodPost, "/api", io.LimitReader(endless{}, 100<<10))) // chunked
	problemOf(t, res, body, 413)
	if e := r.event(); e.Outcome != events.OutcomeAborted || e.Status != 0 || len(e.Charges) != 1 {
		t.Errorf("event %+v", e)
	}
}

// A refusal does not wait for a body that its client never finishes, and neither does the connection.
func TestRefusalsDontWaitForBodies(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: policyFor("http://127.0.0.1:1")})
	for name, body := range map[string]string{
		"declared": "Content-Length: 1000\r\n\r\nabc",
		"chunked":  "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
	} {
		in := bufio.NewReader(r.raw("POST /none HTTP/1.1\r\nHost: x\r\n" + body))
		res, err := http.ReadResponse(in, nil)
		if err != nil || res.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %v, %v", name, res, err)
			continue
		}
		io.Copy(io.Discard, res.Body)
		if _, err := in.ReadByte(); err != io.EOF {
			t.Errorf("%s: the connection stays open: %v", name, err)
		}
	}

	// A body that comes whole leaves the connection usable, for longer than it would have been waited for.
	const whole = "POST /none HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
	conn := r.raw(whole)
	in := bufio.NewReader(conn)
	for range 2 {
		res, err := http.ReadResponse(in, nil)
		if err != nil || res.Close {
			t.Fatalf("%v, %v", res, err)
		}
		io.Copy(io.Discard, res.Body)
		time.Sleep(1200 * time.Millisecond)
		io.WriteString(conn, whole)
	}
}

// endless reads zeros for ever.
type endless struct{}

func (endless) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// Huge headers: a head of more than 32 KiB, and 4 KiB that net/http allows besides, gets 431, over
// HTTP/2 too, and nothing is decided. An upstream's is too large above 64 KiB.
func TestHugeHeaders(t *testing.T) {
	t.Parallel()
	url := h2cUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		n, _ := strconv.Atoi(r.URL.Query().Get("answer"))
		w.Header().Set("X-Big", strings.Repeat("a", n))
	})
	r := newRig(t, rigConfig{policy: policyFor(url), server: []telemetry.ServerOption{telemetry.H2C()}})
	for _, c := range []struct{ size, status int }{{30 << 10, 200}, {40 << 10, 431}, {1_100_000, 431}} {
		conn := r.raw("")
		go io.WriteString(conn, "GET /api HTTP/1.1\r\nHost: x\r\nX-Big: "+strings.Repeat("a", c.size)+"\r\n\r\n")
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || res.StatusCode != c.status {
			t.Errorf("%d bytes: %v, %v", c.size, res, err)
		}
		if c.status == 200 {
			r.event()
		}
		// This client does not even send what the edge has told it to be too much.
		res, err = h2cClient(t).Do(r.request(http.MethodGet, "/api", nil, "X-Big", strings.Repeat("a", c.size)))
		if (err == nil) != (c.status == 200) && (err != nil || res.StatusCode != c.status) {
			t.Errorf("%d bytes over HTTP/2: %v, %v", c.size, res, err)
		}
		if c.status == 200 {
			r.event()
		}
		r.noEvent()
	}
	for _, http2 := range []string{"http2: false", "http2: true"} {
		r.use(withUpstream(policyFor(url), http2))
		for size, status := range map[int]int{60 << 10: 200, 70 << 10: 502} {
			res, _ := r.get("/api?answer=" + strconv.Itoa(size))
			if res.StatusCode != status || len(res.Header.Get("X-Big")) != size*(200/status) {
				t.Errorf("%s: an answer's head of %d bytes: %d", http2, size, res.StatusCode)
			}
			r.event()
		}
	}
}

func TestConnectIsRefusedAndOddMethodsPass(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.Method) })
	r := newRig(t, rigConfig{policy: "upstreams: {up: {url: '" + url + "'}}\nroutes: {all: {path: /, upstream: up}}\n"})
	res, err := http.ReadResponse(bufio.NewReader(r.raw("CONNECT example.test:443 HTTP/1.1\r\nHost: example.test:443\r\n\r\n")), nil)
	if err != nil || res.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("CONNECT: %v, %v", res, err)
	}
	half := newRig(t, rigConfig{policy: "upstreams: {up: {url: '" + url + "'}}\nroutes: {all: {path: /, upstream: up}}\n", server: []telemetry.ServerOption{telemetry.H2C()}})
	res, err = http.ReadResponse(bufio.NewReader(half.raw("PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n")), nil)
	if err != nil || res.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("half an HTTP/2 preface: %v, %v", res, err)
	}
	for _, method := range []string{"PROPFIND", "PURGE", "OPTIONS", "DELETE"} {
		if _, body := r.do(r.request(method, "/", nil)); body != method {
			t.Errorf("%s: %s", method, body)
		}
	}
}

// What comes of an answer is passed on when it comes, not when a buffer is full.
func TestAnswersAreFlushed(t *testing.T) {
	t.Parallel()
	for name, header := range map[string]http.Header{
		"server-sent events": {"Content-Type": {"text/event-stream"}},
		"a declared length":  {"Content-Type": {"application/octet-stream"}, "Content-Length": {"27"}},
		"a large one":        {"Content-Type": {"application/octet-stream"}, "Content-Length": {"100000"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			next := make(chan struct{})
			url := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
				maps.Copy(w.Header(), header)
				for i := range 3 {
					fmt.Fprintf(w, "data: %d\n\n", i)
					http.NewResponseController(w).Flush()
					<-next
				}
				if n, _ := strconv.Atoi(w.Header().Get("Content-Length")); n > 27 {
					w.Write(make([]byte, n-27))
				}
			})
			r := newRig(t, rigConfig{policy: policyFor(url)})
			res, err := client.Do(r.request(http.MethodGet, "/api", nil))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			for i := range 3 {
				got := make([]byte, 9)
				if _, err := io.ReadFull(res.Body, got); err != nil || string(got) != fmt.Sprintf("data: %d\n\n", i) {
					t.Fatalf("%q, %v", got, err)
				}
				if i < 2 {
					r.noEvent()
				}
				next <- struct{}{}
			}
			io.Copy(io.Discard, res.Body)
			if e := r.event(); e.Outcome != events.OutcomeOK || e.Duration < e.Latency {
				t.Errorf("event %+v", e)
			}
		})
	}
}

// A body streams up while the answer streams down.
func TestBothWaysAtOnce(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		rc.EnableFullDuplex()
		w.WriteHeader(200)
		rc.Flush()
		for b := make([]byte, 1); ; {
			if _, err := io.ReadFull(r.Body, b); err != nil {
				time.Sleep(400 * time.Millisecond) // longer than the timeout for a head, which came
				io.WriteString(w, "!")
				return
			}
			w.Write(bytes.ToUpper(b))
			rc.Flush()
		}
	})
	r := newRig(t, rigConfig{policy: strings.Replace(policyFor(url, "max_body_bytes: 10"), "timeout_seconds: 5", "timeout_seconds: 0.3", 1)})
	body, up := io.Pipe()
	res, err := keepAlive(t).Do(r.request(http.MethodPost, "/api", body))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	for _, c := range "abc" {
		io.WriteString(up, string(c))
		got := make([]byte, 1)
		if _, err := io.ReadFull(res.Body, got); err != nil || string(got) != strings.ToUpper(string(c)) {
			t.Fatalf("%q, %v", got, err)
		}
	}
	up.Close()
	if rest, err := io.ReadAll(res.Body); err != nil || string(rest) != "!" {
		t.Errorf("%q, %v", rest, err)
	}
	if e := r.event(); e.Outcome != events.OutcomeOK {
		t.Errorf("event %+v", e)
	}
}

// echoUpgrade switches protocols and sends back what it gets.
func echoUpgrade(w http.ResponseWriter, r *http.Request) {
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\nRateLimit-Limit: 999\r\nX-Compute-Cost: 3\r\n\r\n", r.Header.Get("Upgrade"))
	rw.Flush()
	io.Copy(conn, rw)
}

// upgrade opens a WebSocket (its frames do not matter to a proxy) and checks that it echoes.
func (r *rig) upgrade() net.Conn {
	r.t.Helper()
	conn := r.raw("GET /api HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
	in := bufio.NewReader(conn)
	res, err := http.ReadResponse(in, nil)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols || res.Header.Get("RateLimit-Limit") != "5" || res.Header.Get("X-Compute-Cost") != "" || res.Header.Get("X-Request-Id") == "" {
		r.t.Fatalf("%+v, %v", res, err)
	}
	io.WriteString(conn, "hello")
	got := make([]byte, 5)
	if _, err := io.ReadFull(in, got); err != nil || string(got) != "hello" {
		r.t.Fatalf("%q, %v", got, err)
	}
	return conn
}

// An upgraded connection streams both ways, and is finished once, when it closes.
func TestWebSocket(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: policyFor(upstream(t, echoUpgrade), "capacity: 5", "refill_rate: 1")})
	conn := r.upgrade()
	r.noEvent()
	conn.Close()
	if e := r.event(); e.Outcome != events.OutcomeOK || e.Status != 101 || e.ComputeCost != "3" || len(e.Charges) != 1 {
		t.Errorf("event %+v", e)
	}
	r.noEvent()
}

// Close ends upgraded connections, and returns once they are reported.
func TestCloseEndsUpgradedConnections(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: policyFor(upstream(t, echoUpgrade), "capacity: 5", "refill_rate: 1")})
	r.engine.Sink = lateSink{r}
	conn := r.upgrade()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := r.server.Shutdown(ctx); err != nil { // does not wait for upgraded ones
		t.Fatal(err)
	}
	r.noEvent()
	if err := r.handler.Close(ctx); err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	if len(r.records) != 1 {
		t.Errorf("%d events when Close returned", len(r.records))
	}
	r.mu.Unlock()
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the connection lives on")
	}
}

// lateSink takes its time, so that who does not wait for it is caught.
type lateSink struct{ *rig }

func (s lateSink) Add(rec admission.Record) bool {
	time.Sleep(50 * time.Millisecond)
	return s.rig.Add(rec)
}

// A client that leaves cancels the upstream's work, and is reported once.
func TestClientDisconnects(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		head   bool
		status int
	}{{"before the head", false, 0}, {"after the head", true, 200}} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			serving, cancelled := make(chan struct{}), make(chan struct{})
			url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
				if test.head {
					io.WriteString(w, "begin")
					http.NewResponseController(w).Flush()
				}
				close(serving)
				<-r.Context().Done()
				close(cancelled)
			})
			r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 1")})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if !test.head {
				go func() {
					<-serving
					cancel()
				}()
			}
			res, err := client.Do(r.request(http.MethodGet, "/api", nil).WithContext(ctx))
			if err == nil {
				cancel()
				_, err = io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
			if !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			select {
			case <-cancelled:
			case <-time.After(10 * time.Second):
				t.Fatal("the upstream was not told")
			}
			if e := r.event(); e.Outcome != events.OutcomeAborted || e.Status != test.status || len(e.Charges) != 1 {
				t.Errorf("event %+v", e)
			}
			r.noEvent()
		})
	}
}

// listen serves raw connections, so that an upstream can misbehave.
func listen(t *testing.T, serve func(net.Conn)) (url string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { conn.Close() }) // and not before: an upstream that hangs keeps it open
			go serve(conn)
		}
	}()
	return "http://" + ln.Addr().String()
}

// reset breaks a connection off.
func reset(conn net.Conn) {
	conn.(*net.TCPConn).SetLinger(0)
	conn.Close()
}

func readHead(conn net.Conn) { http.ReadRequest(bufio.NewReader(conn)) }

func TestUpstreamFails(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		url     func(t *testing.T) string
		timeout string
		status  int
		outcome events.Outcome
	}{
		{"refused", func(t *testing.T) string {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			return "http://" + ln.Addr().String()
		}, "5", 502, events.OutcomeUnreached},
		{"no such host", func(*testing.T) string { return "http://nobody.invalid" }, "5", 502, events.OutcomeUnreached},
		{"no TLS there", func(t *testing.T) string {
			return "https" + strings.TrimPrefix(upstream(t, func(http.ResponseWriter, *http.Request) {}), "http")
		}, "5", 502, events.OutcomeUnreached},
		{"TLS that does not answer", func(t *testing.T) string {
			return "https" + strings.TrimPrefix(listen(t, func(net.Conn) {}), "http")
		}, "0.1", 504, events.OutcomeUnreached},
		{"hangs", func(t *testing.T) string { return listen(t, func(net.Conn) {}) }, "0.1", 504, events.OutcomeTimeout},
		{"hangs after the request", func(t *testing.T) string { return listen(t, readHead) }, "0.1", 504, events.OutcomeTimeout},
		{"reset before the head", func(t *testing.T) string {
			return listen(t, func(c net.Conn) { readHead(c); reset(c) })
		}, "5", 502, events.OutcomeReset},
		{"closed before the head", func(t *testing.T) string {
			return listen(t, func(c net.Conn) { readHead(c); c.Close() })
		}, "5", 502, events.OutcomeReset},
		{"nonsense", func(t *testing.T) string {
			return listen(t, func(c net.Conn) { readHead(c); io.WriteString(c, "nonsense\r\n\r\n"); c.Close() })
		}, "5", 502, events.OutcomeReset},
		{"endless head", func(t *testing.T) string {
			return listen(t, func(c net.Conn) {
				readHead(c)
				io.WriteString(c, "HTTP/1.1 200 OK\r\nX-Big: "+strings.Repeat("a", 256<<10)+"\r\n\r\n")
				c.Close()
			})
		}, "5", 502, events.OutcomeReset},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			doc := policyFor(test.url(t), "capacity: 5", "refill_rate: 1", "refund: [unreached, reset]")
			r := newRig(t, rigConfig{policy: strings.Replace(doc, "timeout_seconds: 5", "timeout_seconds: "+test.timeout, 1)})
			res, body := r.get("/api")
			problemOf(t, res, body, test.status)
			if res.Header.Get("RateLimit-Remaining") != "4" {
				t.Errorf("headers %v", res.Header)
			}
			if strings.Contains(body, "127.0.0.1") || strings.Contains(body, "nobody.invalid") {
				t.Errorf("the answer tells of the inside: %s", body)
			}
			if e := r.event(); e.Outcome != test.outcome || e.Status != 0 || len(e.Charges) != 1 || e.Refund != (e.Outcome != events.OutcomeTimeout) {
				t.Errorf("event %+v, want %s", e, test.outcome)
			}
			r.noEvent()
		})
	}
}

// An upstream that breaks off in the middle breaks the client's answer off too: it can't pass for whole.
func TestUpstreamResetsMidBody(t *testing.T) {
	t.Parallel()
	url := listen(t, func(c net.Conn) {
		readHead(c)
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\nX-Compute-Cost: 4\r\n\r\nhalf")
		time.Sleep(10 * time.Millisecond) // for the half to be read before the reset discards it
		reset(c)
	})
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 1")})
	res, err := client.Do(r.request(http.MethodGet, "/api", nil))
	if err == nil {
		_, err = io.Copy(io.Discard, res.Body)
		res.Body.Close()
	}
	if err == nil {
		t.Error("half an answer passed for whole")
	}
	if e := r.event(); e.Outcome != events.OutcomeReset || e.Status != 200 || e.ComputeCost != "4" {
		t.Errorf("event %+v", e)
	}
	r.noEvent()
	if strings.Contains(r.log.String(), "panicked") {
		t.Errorf("an upstream's reset was logged as the edge's panic: %s", r.log)
	}
}

// The upstream's time stands still while the client is what is waited for, and does not run after the head.
func TestSlowClientIsNoSlowUpstream(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.WriteHeader(200)
		http.NewResponseController(w).Flush()
		time.Sleep(300 * time.Millisecond)
		io.WriteString(w, "done")
	})
	r := newRig(t, rigConfig{policy: strings.Replace(policyFor(url), "timeout_seconds: 5", "timeout_seconds: 0.2", 1)})
	body, up := io.Pipe()
	go func() {
		for range 2 {
			time.Sleep(300 * time.Millisecond)
			io.WriteString(up, "x")
		}
		up.Close()
	}()
	res, text := r.do(r.request(http.MethodPost, "/api", body))
	if res.StatusCode != 200 || text != "done" {
		t.Errorf("%d: %s", res.StatusCode, text)
	}
	if e := r.event(); e.Outcome != events.OutcomeOK {
		t.Errorf("event %+v", e)
	}
}

// A client whose body ends too soon is to blame itself.
func TestBrokenRequestBody(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
	r := newRig(t, rigConfig{policy: policyFor(url)})
	res, err := http.ReadResponse(bufio.NewReader(r.raw("POST /api HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n")), nil)
	if err != nil || res.StatusCode != http.StatusBadRequest {
		t.Errorf("%v, %v", res, err)
	}
	if e := r.event(); e.Outcome != events.OutcomeAborted {
		t.Errorf("event %+v", e)
	}
}

// panicStore panics with a secret.
type panicStore struct{ store.Store }

func (panicStore) Check(context.Context, store.Check) (store.Decision, error) { panic("s3cr3t") }

func TestPanicTellsNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: policyFor("http://127.0.0.1:1", "capacity: 5", "refill_rate: 1"), store: panicStore{}})
	res, body := r.get("/api")
	problemOf(t, res, body, 500)
	if strings.Contains(body, "s3cr3t") || strings.Contains(body, "goroutine") {
		t.Errorf("the panic leaked: %s", body)
	}
	if !strings.Contains(r.log.String(), "s3cr3t") {
		t.Error("the panic was not logged")
	}
}

package proxy_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
)

// h2cClient speaks HTTP/2 without TLS.
func h2cClient(t testing.TB) *http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

// keepAlive is a client of HTTP/1.1 that keeps its connections, as most do.
func keepAlive(t testing.TB) *http.Client {
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// h2cUpstream is a backend that speaks HTTP/1.1 and HTTP/2 without TLS.
func h2cUpstream(t testing.TB, h http.HandlerFunc) (url string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	go s.Serve(ln)
	t.Cleanup(func() { s.Close() })
	return "http://" + ln.Addr().String()
}

// withUpstream puts settings into the upstream of policyFor.
func withUpstream(doc, settings string) string {
	return strings.Replace(doc, "timeout_seconds: 5", "timeout_seconds: 5, "+settings, 1)
}

// Bodies, trailers and early hints cross in both directions, whichever HTTP is spoken on either side.
func TestTrailersBothWays(t *testing.T) {
	t.Parallel()
	for _, front := range []int{1, 2} {
		for _, back := range []int{1, 2} {
			t.Run(fmt.Sprintf("HTTP/%d to HTTP/%d", front, back), func(t *testing.T) {
				t.Parallel()
				url := h2cUpstream(t, func(w http.ResponseWriter, r *http.Request) {
					body, err := io.ReadAll(r.Body)
					if err != nil || r.ProtoMajor != back {
						t.Errorf("%s: %v", r.Proto, err)
					}
					w.Header().Set("Trailer", "X-Answer")
					fmt.Fprintf(w, "%s %v", body, r.Trailer)
					w.Header().Set("X-Answer", "a")
				})
				settings := fmt.Sprintf("http2: %v", back == 2)
				r := newRig(t, rigConfig{policy: withUpstream(policyFor(url), settings), server: []telemetry.ServerOption{telemetry.H2C()}})
				c := client
				if front == 2 {
					c = h2cClient(t)
				}
				body, up := io.Pipe()
				req := r.request(http.MethodPost, "/api", body)
				req.Trailer = http.Header{"X-Checksum": nil, "X-Api-Key": nil, "X-Compute-Cost": nil, "X-Forwarded-For": nil}
				go func() {
					io.WriteString(up, "body")
					for name, value := range map[string]string{"X-Checksum": "c", "X-Api-Key": "alice", "X-Compute-Cost": "0", "X-Forwarded-For": "9.9.9.9"} {
						req.Trailer.Set(name, value)
					}
					up.Close()
				}()
				res, err := c.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer res.Body.Close()
				got, err := io.ReadAll(res.Body)
				if want := "body map[X-Checksum:[c]]"; err != nil || string(got) != want || res.ProtoMajor != front {
					t.Errorf("%s: %q, %v; want %q", res.Proto, got, err, want)
				}
				if diff := cmp.Diff(http.Header{"X-Answer": {"a"}}, res.Trailer); diff != "" {
					t.Errorf("trailers (-want +got):\n%s", diff)
				}
				if e := r.event(); e.Outcome != events.OutcomeOK {
					t.Errorf("event %+v", e)
				}
			})
		}
	}
}

// Over HTTP/2 too, what comes is passed on when it comes, and a client that leaves is noticed: it
// resets its stream, and the connection goes on.
func TestHTTP2StreamsAndAborts(t *testing.T) {
	t.Parallel()
	cancelled := make(chan struct{})
	url := h2cUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		for n := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", n)
			http.NewResponseController(w).Flush()
		}
		<-r.Context().Done()
		close(cancelled)
	})
	r := newRig(t, rigConfig{policy: withUpstream(policyFor(url, "capacity: 5", "refill_rate: 0.001"), "http2: true"), server: []telemetry.ServerOption{telemetry.H2C()}})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	res, err := h2cClient(t).Do(r.request(http.MethodGet, "/api", nil).WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	got := make([]byte, 27)
	if _, err := io.ReadFull(res.Body, got); err != nil || string(got) != "data: 0\n\ndata: 1\n\ndata: 2\n\n" {
		t.Fatalf("%q, %v", got, err)
	}
	r.noEvent()
	cancel()
	select {
	case <-cancelled:
	case <-time.After(10 * time.Second):
		t.Fatal("the upstream was not told")
	}
	if e := r.event(); e.Outcome != events.OutcomeAborted || len(e.Charges) != 1 {
		t.Errorf("event %+v", e)
	}
	r.noEvent()
}

// An https upstream speaks HTTP/2, and is asked by its own name unless the policy says otherwise.
// Not parallel: it sets the process's trusted certificates.
func TestHTTPSUpstream(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.Proto+" "+r.Host)
	}))
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(s.Close)
	file := filepath.Join(t.TempDir(), "roots.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SSL_CERT_FILE", file)
	for settings, want := range map[string]string{
		"http2: false":    "HTTP/2.0 " + strings.TrimPrefix(s.URL, "https://"),
		"http2: true":     "HTTP/2.0 " + strings.TrimPrefix(s.URL, "https://"),
		"pass_host: true": "HTTP/2.0 edge.test",
	} {
		r := newRig(t, rigConfig{policy: withUpstream(policyFor(s.URL), settings)})
		req := r.request(http.MethodGet, "/api", nil)
		req.Host = "edge.test"
		if res, body := r.do(req); res.StatusCode != 200 || body != want {
			t.Errorf("%s: %d %q, want %q", settings, res.StatusCode, body, want)
		}
	}
	// HTTP/2 has no upgrades, so only those to WebSockets, which net/http asks for by HTTP/1.1, are asked for by TLS.
	for protocol, want := range map[string]string{"websocket": "HTTP/1.1", "other": "HTTP/2.0"} {
		r := newRig(t, rigConfig{policy: policyFor(s.URL)})
		res, body := r.do(r.request(http.MethodGet, "/api", nil, "Connection", "Upgrade", "Upgrade", protocol))
		if res.StatusCode != 200 || !strings.HasPrefix(body, want) {
			t.Errorf("upgrade to %s: %d %q, want %s", protocol, res.StatusCode, body, want)
		}
	}
	plain := upstream(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.Host) })
	r := newRig(t, rigConfig{policy: withUpstream(policyFor(plain), "pass_host: false")})
	req := r.request(http.MethodGet, "/api", nil)
	req.Host = "edge.test"
	if _, body := r.do(req); body != strings.TrimPrefix(plain, "http://") {
		t.Errorf("pass_host: false: %q", body)
	}
}

// A client that asks before it sends its body is told to go on by the upstream's will, and not at
// all where the request is refused.
func TestExpectContinue(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/no" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		body, _ := io.ReadAll(r.Body)
		w.Write(bytes.ToUpper(body))
	})
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 2", "refill_rate: 0.001", "max_body_bytes: 10")})
	ask := func(path string, length int) (net.Conn, *bufio.Reader, *http.Response) {
		t.Helper()
		conn := r.raw(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n", path, length))
		in := bufio.NewReader(conn)
		res, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		return conn, in, res
	}
	conn, in, res := ask("/api", 4)
	if res.StatusCode != http.StatusContinue {
		t.Fatalf("got %s", res.Status)
	}
	io.WriteString(conn, "body")
	res, err := http.ReadResponse(in, nil)
	if err != nil || res.StatusCode != 200 {
		t.Fatalf("%v, %v", res, err)
	}
	if body, err := io.ReadAll(res.Body); err != nil || string(body) != "BODY" {
		t.Errorf("%q, %v", body, err)
	}
	r.event()
	if _, _, res = ask("/api/no", 4); res.StatusCode != http.StatusForbidden {
		t.Errorf("an upstream that wants no body: %s", res.Status)
	}
	r.event()
	if _, _, res = ask("/api", 11); res.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("too large a body: %s", res.Status)
	}
	if _, _, res = ask("/api", 4); res.StatusCode != http.StatusTooManyRequests && res.StatusCode != http.StatusAccepted {
		t.Errorf("over the limit: %s", res.Status)
	}
	r.noEvent()
}

// HEAD, ranges, conditions and content codings are between the client and the upstream.
func TestAnswersAreUntouched(t *testing.T) {
	t.Parallel()
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	io.WriteString(z, strings.Repeat("text ", 1000))
	z.Close()
	var accepted atomic.Value
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		accepted.Store(strings.Join(r.Header.Values("Accept-Encoding"), "|"))
		w.Header().Set("ETag", `"one"`)
		if r.URL.Path == "/api/untyped" {
			w.Header()["Content-Type"] = nil
			io.WriteString(w, "<html>")
			return
		}
		if r.URL.Path == "/api/zip" {
			w.Header().Set("Content-Encoding", "gzip")
			w.Write(zipped.Bytes())
			return
		}
		http.ServeContent(w, r, "x.bin", time.Time{}, strings.NewReader("0123456789"))
	})
	r := newRig(t, rigConfig{policy: policyFor(url)})
	if res, body := r.get("/api/untyped"); len(res.Header.Values("Content-Type")) > 0 || body != "<html>" {
		t.Errorf("%q was given the type %q", body, res.Header.Values("Content-Type"))
	}
	r.event()
	bare := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}
	for _, test := range []struct {
		name, method, path, header, value string
		status                            int
		length, ranged, body, accepted    string
	}{
		{"HEAD", "HEAD", "/api", "", "", 200, "10", "", "", ""},
		{"GET", "GET", "/api", "", "", 200, "10", "", "0123456789", ""},
		{"a range", "GET", "/api", "Range", "bytes=2-4", 206, "3", "bytes 2-4/10", "234", ""},
		{"a range of nothing", "GET", "/api", "Range", "bytes=20-", 416, "", "bytes */10", "", ""},
		{"a condition", "GET", "/api", "If-None-Match", `"one"`, 304, "", "", "", ""},
		{"gzip", "GET", "/api/zip", "Accept-Encoding", "gzip, br", 200, fmt.Sprint(zipped.Len()), "", zipped.String(), "gzip, br"},
		{"gzip nobody asked for", "GET", "/api/zip", "", "", 200, fmt.Sprint(zipped.Len()), "", zipped.String(), ""},
	} {
		req := r.request(test.method, test.path, nil)
		if test.header != "" {
			req.Header.Set(test.header, test.value)
		}
		res, err := bare.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || res.StatusCode != test.status || test.status < 300 && string(body) != test.body ||
			test.length != "" && res.Header.Get("Content-Length") != test.length || res.Header.Get("Content-Range") != test.ranged {
			t.Errorf("%s: %s %v %q, %v", test.name, res.Status, res.Header, body, err)
		}
		if accepted.Load() != test.accepted {
			t.Errorf("%s: the upstream was told to use %q, want %q", test.name, accepted.Load(), test.accepted)
		}
		r.event()
	}
}

// Requests that are sent ahead on one connection are answered in order, each by its own charge.
func TestPipelining(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.URL.Path) })
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 10", "refill_rate: 0.001")})
	const n = 5
	var sent strings.Builder
	for i := range n {
		fmt.Fprintf(&sent, "GET /api/%d HTTP/1.1\r\nHost: x\r\n\r\n", i)
	}
	in := bufio.NewReader(r.raw(sent.String()))
	for i := range n {
		res, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(res.Body)
		if err != nil || string(body) != fmt.Sprintf("/api/%d", i) || res.Header.Get("RateLimit-Remaining") != fmt.Sprint(9-i) {
			t.Errorf("answer %d: %q, %v, remaining %s", i, body, err, res.Header.Get("RateLimit-Remaining"))
		}
		r.event()
	}
	r.noEvent()
}

// Large bodies stream through in bounded memory, in both directions. Not parallel: it looks at the process's memory.
func TestHugeBodyInBoundedMemory(t *testing.T) {
	const size, room = 128 << 20, 32 << 20
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		io.Copy(w, r.Body)
	})
	r := newRig(t, rigConfig{policy: policyFor(url, "max_body_bytes: 1000000000")})
	var before, now runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	sum := sha256.New()
	block := bytes.Repeat([]byte("0123456789abcdef"), 4096)
	body := io.TeeReader(io.LimitReader(&repeated{block: block}, size), sum)
	res, err := keepAlive(t).Do(r.request(http.MethodPost, "/api", body))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	got, peak := sha256.New(), uint64(0)
	for {
		n, err := io.CopyN(got, res.Body, 8<<20)
		runtime.ReadMemStats(&now)
		peak = max(peak, now.HeapAlloc)
		if err != nil || n == 0 {
			break
		}
	}
	if hex.EncodeToString(got.Sum(nil)) != hex.EncodeToString(sum.Sum(nil)) {
		t.Error("the body came back changed")
	}
	if peak > before.HeapAlloc+room {
		t.Errorf("%d MiB of heap for a body of %d MiB", (peak-before.HeapAlloc)>>20, size>>20)
	}
	if e := r.event(); e.Outcome != events.OutcomeOK {
		t.Errorf("event %+v", e)
	}
}

// repeated reads a block again and again.
type repeated struct {
	block []byte
	at    int
}

func (r *repeated) Read(p []byte) (int, error) {
	n := copy(p, r.block[r.at:])
	r.at = (r.at + n) % len(r.block)
	return n, nil
}

// A client that leaves stops the upstream's work within 100 ms; the best of a few tries, since others use the machine.
func TestClientDisconnectIsPassedOnAtOnce(t *testing.T) {
	t.Parallel()
	started, stopped := make(chan struct{}), make(chan time.Time)
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		started <- struct{}{}
		<-r.Context().Done()
		stopped <- time.Now()
	})
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 50", "refill_rate: 1")})
	best := time.Hour
	for range 5 {
		conn := r.raw("GET /api HTTP/1.1\r\nHost: x\r\n\r\n")
		<-started
		left := time.Now()
		conn.Close()
		best = min(best, (<-stopped).Sub(left))
		if e := r.event(); e.Outcome != events.OutcomeAborted || len(e.Charges) != 1 {
			t.Errorf("event %+v", e)
		}
	}
	r.noEvent()
	t.Logf("the upstream was told after %v", best)
	if best > 100*time.Millisecond {
		t.Errorf("the upstream was told after %v", best)
	}
}

// No more connections than allowed are opened; requests wait for one, as long as the upstream may take to answer.
func TestConnectionLimit(t *testing.T) {
	t.Parallel()
	var open, most atomic.Int64
	release := make(chan struct{})
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/held" {
			http.NewResponseController(w).Flush()
		}
		select {
		case <-release:
		case <-r.Context().Done():
		}
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		switch state {
		case http.StateNew:
			n := open.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
		case http.StateClosed:
			open.Add(-1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	r := newRig(t, rigConfig{policy: withUpstream(policyFor(s.URL, "capacity: 100", "refill_rate: 1"), "max_connections: 2")})
	var asked sync.WaitGroup
	for range 6 {
		asked.Go(func() {
			if res, body := r.get("/api"); res.StatusCode != 200 {
				t.Errorf("%d: %s", res.StatusCode, body)
			}
		})
	}
	bustest.Await(t, "two connections", func() bool { return open.Load() == 2 })
	for range 6 {
		release <- struct{}{}
		r.event()
	}
	asked.Wait()
	if most.Load() != 2 {
		t.Errorf("%d connections at once", most.Load())
	}

	// None is free in time: it was never reached, and is settled so.
	impatient := newRig(t, rigConfig{policy: strings.Replace(withUpstream(policyFor(s.URL), "max_connections: 1"), "timeout_seconds: 5", "timeout_seconds: 0.3", 1)})
	held, err := client.Do(impatient.request(http.MethodGet, "/api/held", nil))
	if err != nil {
		t.Fatal(err)
	}
	res, body := impatient.get("/api")
	problemOf(t, res, body, 504)
	if e := impatient.event(); e.Outcome != events.OutcomeUnreached {
		t.Errorf("event %+v", e)
	}
	held.Body.Close()
	if e := impatient.event(); e.Outcome != events.OutcomeAborted {
		t.Errorf("event %+v", e)
	}
}

// An upstream that takes too long to be connected to is given up before it is time for its answer.
func TestConnectTimeout(t *testing.T) {
	t.Parallel()
	silent := "https" + strings.TrimPrefix(listen(t, func(net.Conn) {}), "http")
	r := newRig(t, rigConfig{policy: withUpstream(policyFor(silent), "connect_timeout_seconds: 0.1")})
	res, body := r.get("/api")
	problemOf(t, res, body, 502)
	if e := r.event(); e.Outcome != events.OutcomeUnreached || e.Duration > 4_000_000 {
		t.Errorf("event %+v", e)
	}
}

// A request meets a connection that was kept and is dead. It is sent again, once, where it is
// idempotent, has no body, and no byte was answered; it is charged and reported once. Others fail.
func TestReplay(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		method, body, answered string
		header                 []string
		status, seen           int
		outcome                events.Outcome
	}{
		{http.MethodGet, "", "", nil, 200, 2, events.OutcomeOK},
		{http.MethodHead, "", "", nil, 200, 2, events.OutcomeOK},
		{http.MethodPost, "", "", []string{"Idempotency-Key", "1"}, 200, 2, events.OutcomeOK},
		{http.MethodPost, "", "", nil, 502, 1, events.OutcomeReset},
		{http.MethodDelete, "", "", nil, 502, 1, events.OutcomeReset},
		{http.MethodPut, "body", "", nil, 502, 1, events.OutcomeReset},
		{http.MethodGet, "body", "", nil, 502, 1, events.OutcomeReset},
		{http.MethodGet, "", "H", nil, 502, 1, events.OutcomeReset},
		{http.MethodGet, "", "HTTP/1.1 200 OK\r\nX-A: b\r\n", nil, 502, 1, events.OutcomeReset},
	} {
		t.Run(strings.Join([]string{test.method, test.body, test.answered, strings.Join(test.header, " ")}, " "), func(t *testing.T) {
			t.Parallel()
			var seen, conns atomic.Int64
			url := listen(t, func(c net.Conn) {
				first := conns.Add(1) == 1
				in := bufio.NewReader(c)
				for n := 0; ; n++ {
					req, err := http.ReadRequest(in)
					if err != nil {
						return
					}
					io.Copy(io.Discard, req.Body)
					if req.URL.Path != "/api/warm" {
						seen.Add(1)
					}
					if first && n == 1 {
						io.WriteString(c, test.answered)
						c.Close()
						return
					}
					io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
				}
			})
			r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 0.001")})
			r.get("/api/warm")
			r.event()
			var body io.Reader
			if test.body != "" {
				body = strings.NewReader(test.body)
			}
			res, _ := r.do(r.request(test.method, "/api", body, test.header...))
			if res.StatusCode != test.status || res.Header.Get("RateLimit-Remaining") != "3" || seen.Load() != int64(test.seen) {
				t.Errorf("%d, remaining %s, sent %d times; want %d, 3, %d", res.StatusCode, res.Header.Get("RateLimit-Remaining"), seen.Load(), test.status, test.seen)
			}
			if e := r.event(); e.Outcome != test.outcome || len(e.Charges) != 1 {
				t.Errorf("event %+v", e)
			}
			r.noEvent()
		})
	}
}

// Connections follow the policy: another limit is in force for the next request, and nothing under way is broken.
func TestConnectionRulesChange(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	url := h2cUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/long" {
			http.NewResponseController(w).Flush()
			<-release
		}
		io.WriteString(w, r.Proto)
	})
	r := newRig(t, rigConfig{policy: policyFor(url)})
	res, err := client.Do(r.request(http.MethodGet, "/api/long", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	r.use(withUpstream(policyFor(url), "http2: true"))
	if _, body := r.get("/api"); body != "HTTP/2.0" {
		t.Errorf("the new rules: %s", body)
	}
	close(release)
	if body, err := io.ReadAll(res.Body); err != nil || string(body) != "HTTP/1.1" {
		t.Errorf("under way: %q, %v", body, err)
	}
}

// An upstream that the policy has no more is forgotten: its idle connections are closed, and one in
// use when it becomes idle.
func TestRemovedUpstreamIsForgotten(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	var open atomic.Int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/old/long" {
			http.NewResponseController(w).Flush()
			<-release
		}
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		switch state {
		case http.StateNew:
			open.Add(1)
		case http.StateClosed:
			open.Add(-1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	kept := upstream(t, func(http.ResponseWriter, *http.Request) {})
	both := strings.Replace(policyFor(kept), "routes:\n", "routes:\n  old: {path: /old, upstream: old}\n", 1)
	both = strings.Replace(both, "upstreams: {", "upstreams: {old: {url: '"+s.URL+"'}, ", 1)
	r := newRig(t, rigConfig{policy: both})
	long, err := client.Do(r.request(http.MethodGet, "/old/long", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer long.Body.Close()
	r.get("/old")
	r.get("/api")
	if open.Load() != 2 {
		t.Fatalf("%d connections", open.Load())
	}
	r.use(policyFor(kept))
	r.get("/api")
	bustest.Await(t, "the idle connection's end", func() bool { return open.Load() == 1 })
	close(release)
	if _, err := io.Copy(io.Discard, long.Body); err != nil {
		t.Errorf("the answer under way: %v", err)
	}
	bustest.Await(t, "the other's end", func() bool { return open.Load() == 0 })
	if res, _ := r.get("/old"); res.StatusCode != http.StatusNotFound {
		t.Errorf("the removed route: %d", res.StatusCode)
	}
}

// An upstream that takes no body, or answers before it has: the answer comes at once, and the
// connection ends with it, since a rest of the body must not be taken for a request.
func TestBodiesNobodyReads(t *testing.T) {
	t.Parallel()
	early := rawUpstream(t, "HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno")
	const small, large = 10_000, 2 << 20
	for _, c := range []struct {
		name, upstream string
		declared, sent int
		status         int
	}{
		{"unreached", "http://127.0.0.1:1", small, small, http.StatusBadGateway},
		{"unreached, large", "http://127.0.0.1:1", large, small, http.StatusBadGateway},
		{"unreached, stalled", "http://127.0.0.1:1", small, 10, http.StatusBadGateway},
		{"early answer, large", early, large, small, http.StatusUnauthorized},
		{"early answer, stalled", early, small, 10, http.StatusUnauthorized},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigConfig{policy: policyFor(c.upstream, "capacity: 100", "refill_rate: 2")})
			conn := r.raw(fmt.Sprintf("POST /api HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", c.declared))
			if _, err := io.WriteString(conn, strings.Repeat("x", c.sent)); err != nil {
				t.Fatal(err)
			}
			in := bufio.NewReader(conn)
			res, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != c.status {
				t.Fatalf("status %d, want %d; %v", res.StatusCode, c.status, err)
			}
			io.WriteString(conn, "GET /none HTTP/1.1\r\nHost: x\r\n\r\n") // part of the body, or too late
			if rest, err := io.ReadAll(in); len(rest) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("want the connection closed with nothing more on it, got %v and %q", err, rest)
			}
			if log := r.log.String(); strings.Contains(log, "panic") {
				t.Error(log)
			}
		})
	}
}

// rawUpstream answers each connection's first request, once its head has come, and takes nothing more.
func rawUpstream(t *testing.T, answer string) (url string) {
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
			t.Cleanup(func() { conn.Close() })
			go func() {
				if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
					io.WriteString(conn, answer)
				}
			}()
		}
	}()
	return "http://" + ln.Addr().String()
}

package edge_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge"
)

// raw opens a connection to the edge and sends what is given.
func (r *rig) raw(data string) *net.TCPConn {
	r.t.Helper()
	conn, err := net.Dial("tcp", r.service.Addr())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	if _, err := io.WriteString(conn, data); err != nil {
		r.t.Fatal(err)
	}
	return conn.(*net.TCPConn)
}

// A client that asks for much and reads nothing holds its connection, its upstream and its memory for a bounded
// time; what it used is settled.
func TestStalledReader(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	gone := make(chan struct{}, 8)
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/endless" {
			return
		}
		for chunk := make([]byte, 64<<10); r.Context().Err() == nil; {
			if _, err := w.Write(chunk); err != nil {
				break
			}
		}
		gone <- struct{}{}
	}))
	t.Cleanup(up.Close)
	publish(t, b, policyFor(t, up.URL, 1000))
	r := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)}, func(c *edge.Config) { c.WriteTimeout = 500 * time.Millisecond })
	r.awaitVersion(1)
	for range 5 {
		conn := r.raw("GET /api/endless HTTP/1.1\r\nHost: h\r\n\r\n")
		conn.SetReadBuffer(4 << 10)
	}
	for range 5 {
		select {
		case <-gone:
		case <-time.After(30 * time.Second):
			t.Fatal("the upstream still works for a client that does not read")
		}
	}
	if res := r.get("/api"); res.StatusCode != http.StatusOK {
		t.Errorf("others: %s", res.Status)
	}
	r.stop()
	aborted := 0
	for _, batch := range responses(t, b) {
		for _, e := range batch.Events {
			if e.Outcome == events.OutcomeAborted {
				aborted++
			}
		}
	}
	if aborted != 5 {
		t.Errorf("%d of 5 are settled as aborted", aborted)
	}
}

// An upstream that hangs costs its clients a 504 at the deadline and healthwatch a sample each, and leaves nothing behind.
func TestUpstreamHangLeaksNothing(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // never accepts: the kernel does, and nobody answers
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	b := bustest.Start(t).Provisioned(t)
	p := policyFor(t, "http://"+ln.Addr().String(), 1000)
	u := p.Upstreams["up"]
	u.TimeoutSeconds = 0.3
	p.Upstreams["up"] = u
	publish(t, b, p)
	r := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)})
	r.awaitVersion(1)
	r.get("/api") // whatever a first request makes once
	before := runtime.NumGoroutine()
	const n = 60
	status := make(chan int, n)
	for range n {
		go func() { status <- r.get("/api").StatusCode }()
	}
	for range n {
		if got := <-status; got != http.StatusGatewayTimeout {
			t.Errorf("status %d", got)
		}
	}
	bustest.Await(t, "no goroutine more than before", func() bool { return runtime.NumGoroutine() <= before+n/4 })
	r.stop()
	timeouts := 0
	for _, batch := range responses(t, b) {
		for _, e := range batch.Events {
			if e.Outcome == events.OutcomeTimeout && e.Latency >= 300_000 {
				timeouts++
			}
		}
	}
	if timeouts != n+1 {
		t.Errorf("%d samples of timeouts, want %d", timeouts, n+1)
	}
}

// slowLoris opens so many connections that send a byte a second, and reports how many the edge still holds after each
// has had its time.
func slowLoris(t *testing.T, connections int) {
	t.Helper()
	b := bustest.Start(t).Provisioned(t)
	publish(t, b, policyFor(t, backend(t), 1000))
	r := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)})
	r.awaitVersion(1)
	before := rss(t)
	conns := make([]*net.TCPConn, connections)
	for i := range conns {
		conns[i] = r.raw("GET /api HTTP/1.1\r\nHost: h\r\nX-Slow: ")
	}
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		for {
			for _, c := range conns {
				io.WriteString(c, "a") // one that is closed does not matter
			}
			select {
			case <-stop:
				return
			case <-time.After(time.Second):
			}
		}
	}()
	if res := r.get("/api"); res.StatusCode != http.StatusOK {
		t.Errorf("others: %s", res.Status)
	}
	grown := rss(t) - before
	deadline := time.Now().Add(60 * time.Second) // five seconds are promised for each; the rest is for a busy machine
	for i, c := range conns {
		c.SetReadDeadline(deadline)
		answer, err := io.ReadAll(c)
		if err != nil && strings.Contains(err.Error(), "timeout") {
			t.Fatalf("connection %d is still open: %q", i, answer)
		}
	}
	t.Logf("%d connections took %d KiB each", connections, max(grown, 0)/int64(connections)>>10)
}

func TestSlowLoris200(t *testing.T) {
	t.Parallel()
	slowLoris(t, 200)
}

// rss is the resident memory of this process, in bytes.
func rss(t *testing.T) int64 {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.SplitSeq(string(status), "\n") {
		var kib int64
		if n, _ := fmt.Sscanf(line, "VmRSS: %d kB", &kib); n == 1 {
			return kib << 10
		}
	}
	t.Fatal("no VmRSS")
	return 0
}

package proxy_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
)

// drip writes s again and again, slowly, until the connection is closed or stop is.
func drip(conn io.Writer, s string, every time.Duration, stop <-chan struct{}) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if _, err := io.WriteString(conn, s); err != nil {
			return
		}
		select {
		case <-tick.C:
		case <-stop:
			return
		}
	}
}

// Slow-loris: a head that does not end within five seconds ends its connection, however it comes,
// and nothing of it is decided.
func TestSlowLorisHeads(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: policyFor("http://127.0.0.1:1")})
	var waiting sync.WaitGroup
	for n := range 60 {
		waiting.Go(func() {
			conn := r.raw("")
			conn.SetDeadline(time.Now().Add(30 * time.Second))
			begun := time.Now()
			switch n % 3 {
			case 0: // nothing at all
			case 1:
				io.WriteString(conn, "GET /api HTTP/1.1\r\nHost: x\r\nX-A: ")
			case 2:
				go drip(conn, "X-A: b\r\n", 250*time.Millisecond, t.Context().Done())
			}
			if got, err := io.ReadAll(conn); len(got) > 0 && !strings.HasPrefix(string(got), "HTTP/1.1 4") {
				t.Errorf("kind %d: %q, %v", n%3, got, err)
			}
			// Five seconds are promised; the rest is for a busy machine.
			if took := time.Since(begun); took > 15*time.Second {
				t.Errorf("kind %d: closed after %v", n%3, took)
			}
		})
	}
	waiting.Wait()
	r.noEvent()
}

// A body that stalls, or comes a byte at a time, gets 408. It is over for the upstream then, and
// for the connection.
func TestSlowLorisBodies(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		head, drip string
		began      bool // for the upstream too
	}{
		"declared":          {"Content-Length: 1000\r\n\r\nabc", "", true},
		"chunked":           {"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "", true},
		"none of it":        {"Content-Length: 1000\r\n\r\n", "", false},
		"drips":             {"Content-Length: 100000\r\n\r\n", "x", true},
		"drips chunks":      {"Transfer-Encoding: chunked\r\n\r\n", "1\r\nx\r\n", true},
		"after a 100":       {"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n", "", false},
		"in a trailer":      {"Transfer-Encoding: chunked\r\nTrailer: X-A\r\n\r\n3\r\nabc\r\n0\r\nX-A: ", "", true},
		"in a chunk's size": {"Transfer-Encoding: chunked\r\n\r\n3", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			over := make(chan struct{})
			url := upstream(t, func(_ http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				<-r.Context().Done()
				close(over)
			})
			r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 1"), body: 400 * time.Millisecond})
			conn := r.raw("POST /api HTTP/1.1\r\nHost: x\r\n" + c.head)
			if c.drip != "" {
				stop := make(chan struct{})
				defer close(stop)
				go drip(conn, c.drip, 20*time.Millisecond, stop)
			}
			in := bufio.NewReader(conn)
			res, err := http.ReadResponse(in, nil)
			for err == nil && res.StatusCode == http.StatusContinue {
				res, err = http.ReadResponse(in, nil)
			}
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(res.Body)
			problemOf(t, res, string(body), http.StatusRequestTimeout)
			if !res.Close {
				t.Error("the connection is to be kept")
			}
			if _, err := io.Copy(io.Discard, in); err != nil && !isReset(err) {
				t.Errorf("the connection stays: %v", err)
			}
			if e := r.event(); e.Outcome != events.OutcomeAborted || e.Status != 0 || len(e.Charges) != 1 {
				t.Errorf("event %+v", e)
			}
			r.noEvent()
			if c.began {
				select {
				case <-over:
				case <-time.After(10 * time.Second):
					t.Error("the upstream was not told")
				}
			}
		})
	}
}

func isReset(err error) bool {
	_, ok := err.(*net.OpError)
	return ok && strings.Contains(err.Error(), "reset")
}

// Over HTTP/2 the stream ends, and the connection goes on.
func TestSlowLorisBodyOverHTTP2(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
	r := newRig(t, rigConfig{policy: policyFor(url), body: 300 * time.Millisecond, server: []telemetry.ServerOption{telemetry.H2C()}})
	c := h2cClient(t)
	body, up := io.Pipe()
	defer up.Close()
	go io.WriteString(up, "abc")
	var conns atomic.Int64
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		if !i.Reused {
			conns.Add(1)
		}
	}})
	res, err := c.Do(r.request(http.MethodPost, "/api", body).WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(res.Body)
	res.Body.Close()
	problemOf(t, res, string(text), http.StatusRequestTimeout)
	if e := r.event(); e.Outcome != events.OutcomeAborted {
		t.Errorf("event %+v", e)
	}
	if res, err = c.Do(r.request(http.MethodGet, "/api", nil).WithContext(ctx)); err != nil || res.StatusCode != 200 || conns.Load() != 1 {
		t.Errorf("%v, %v, on connection %d", res, err, conns.Load())
	}
}

// Once the answer has begun, the two may take their time.
func TestSlowBodyBehindItsAnswer(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		rc.EnableFullDuplex()
		w.WriteHeader(200)
		rc.Flush()
		io.Copy(w, r.Body)
	})
	r := newRig(t, rigConfig{policy: policyFor(url), body: 300 * time.Millisecond})
	body, up := io.Pipe()
	res, err := keepAlive(t).Do(r.request(http.MethodPost, "/api", body))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	time.Sleep(600 * time.Millisecond)
	io.WriteString(up, "late")
	up.Close()
	if got, err := io.ReadAll(res.Body); err != nil || string(got) != "late" {
		t.Errorf("%q, %v", got, err)
	}
}

// A client hears 100 once, when its body is read, and not at all from an upstream that refuses the body,
// whatever the upstream says of it, or does not say.
func TestContinueIsHeardOnce(t *testing.T) {
	t.Parallel()
	const ok, no, more = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 100 Continue\r\nX-A: b\r\n\r\n"
	for name, c := range map[string]struct {
		before, after string // what the upstream says, before and after it has read the body
		asked         bool
		heard, status int
	}{
		"once":                    {more, ok, true, 1, 200},
		"twice":                   {more + more, ok, true, 1, 200},
		"before and after":        {more, more + ok, true, 1, 200},
		"only after":              {"", more + ok, true, 1, 200},
		"never":                   {"", ok, true, 1, 200},
		"never, and it refuses":   {no, "", true, 0, 403},
		"unasked":                 {more, more + ok, false, 0, 200},
		"with other informations": {"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + more, ok, true, 1, 200},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := listen(t, func(conn net.Conn) {
				req, err := http.ReadRequest(bufio.NewReader(conn))
				if err != nil {
					return
				}
				io.WriteString(conn, c.before)
				if c.after == "" {
					return
				}
				if got, err := io.ReadAll(req.Body); err != nil || string(got) != "body" {
					t.Errorf("the upstream got %q, %v", got, err)
				}
				io.WriteString(conn, c.after)
			})
			r := newRig(t, rigConfig{policy: policyFor(url)})
			head := "POST /api HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
			if c.asked {
				head += "Expect: 100-continue\r\n"
			}
			conn := r.raw(head + "\r\n")
			if !c.asked {
				io.WriteString(conn, "body")
			}
			in, heard := bufio.NewReader(conn), 0
			for {
				res, err := http.ReadResponse(in, nil)
				if err != nil {
					t.Fatal(err)
				}
				if res.StatusCode == http.StatusContinue {
					if heard++; heard == 1 {
						io.WriteString(conn, "body")
					}
					continue
				}
				if res.StatusCode < 200 {
					continue
				}
				if heard != c.heard || res.StatusCode != c.status {
					t.Errorf("heard 100 %d times and then %d, want %d and %d", heard, res.StatusCode, c.heard, c.status)
				}
				break
			}
			r.event()

			// HTTP/2 clients hear it once too.
			r = newRig(t, rigConfig{policy: policyFor(url), server: []telemetry.ServerOption{telemetry.H2C()}})
			var continued atomic.Int64
			req := r.request(http.MethodPost, "/api", strings.NewReader("body"))
			if c.asked {
				req.Header.Set("Expect", "100-continue")
			}
			req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
				Got1xxResponse: func(code int, _ textproto.MIMEHeader) error {
					if code == http.StatusContinue {
						continued.Add(1)
					}
					return nil
				},
			}))
			tr := &http.Transport{Protocols: new(http.Protocols), ExpectContinueTimeout: 20 * time.Second}
			tr.Protocols.SetUnencryptedHTTP2(true)
			defer tr.CloseIdleConnections()
			res, err := tr.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			// net/http takes the question off an HTTP/2 request, so the upstream can't say no to it: the body is always read.
			want := int64(0)
			if c.asked {
				want = 1
			}
			if got := continued.Load(); got > want || c.status == 200 && got != want || res.StatusCode != c.status {
				t.Errorf("HTTP/2: heard 100 %d times and then %d", got, res.StatusCode)
			}
		})
	}
}

package proxy_test

import (
	"bufio"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
)

// A request whose route can't be told from its target reaches no upstream by any.
func TestTargets(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("the upstream got %q of %q", r.RequestURI, r.Host)
	})
	r := newRig(t, rigConfig{policy: strings.Replace(policyFor(url), "path: /api", "path: /", 1)})
	for _, target := range []string{"x:http://h/api/closed", "x:api", "http:api", "*", "http://%FF/", "http://%E2%80%AE/", "http://<h>/"} {
		conn := r.raw("GET " + target + " HTTP/1.1\r\nHost: h\r\n\r\n")
		if res, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || res.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %+v, %v", target, res, err)
		}
	}
	r.noEvent()
}

// What a client asks for beyond what can be sent on is left out. It is neither a failure of the upstream, which would lower
// the limits of all, nor a way past admission.
func TestWhatClientsCantMakeTheUpstreamFail(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var upgrade string
	var trailers []string
	url := upstream(t, func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		mu.Lock()
		defer mu.Unlock()
		upgrade, trailers = r.Header.Get("Upgrade"), nil
		for name := range r.Trailer {
			trailers = append(trailers, name)
		}
		slices.Sort(trailers)
	})
	r := newRig(t, rigConfig{policy: policyFor(url)})
	const upgraded = "Connection: Upgrade\r\nUpgrade: "
	for _, c := range []struct{ head, upgrade, trailers string }{
		{upgraded + "websocket\r\n\r\n", "websocket", ""},
		{upgraded + "SPDY/3.1\r\n\r\n", "SPDY/3.1", ""},
		{upgraded + "h2c\r\n\r\n", "", ""},
		{upgraded + "H2C\r\n\r\n", "", ""},
		{upgraded + "websocket, h2c\r\n\r\n", "", ""},
		{upgraded + "HTTP/1.1\r\n\r\n", "", ""},
		{upgraded + "TLS/1.2\r\n\r\n", "", ""},
		{upgraded + "\xff\r\n\r\n", "", ""},
		{"Transfer-Encoding: chunked\r\nTrailer: a b, (, X-Sum, X-Real-Ip, X_Forwarded_For\r\n\r\n0\r\nX-Sum: 1\r\nX-Real-Ip: 6.6.6.6\r\n\r\n", "", "X-Sum"},
	} {
		conn := r.raw("POST /api HTTP/1.1\r\nHost: h\r\n" + c.head)
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || res.StatusCode != http.StatusOK {
			t.Errorf("%q: %+v, %v", c.head, res, err)
		}
		if e := r.event(); e.Outcome != events.OutcomeOK {
			t.Errorf("%q: outcome %s", c.head, e.Outcome)
		}
		mu.Lock()
		if got := strings.Join(trailers, " "); upgrade != c.upgrade || got != c.trailers {
			t.Errorf("%q: the upstream saw the upgrade %q and the trailers %q, want %q and %q", c.head, upgrade, got, c.upgrade, c.trailers)
		}
		mu.Unlock()
	}
}

// In HTTP/2 a request may announce a trailer and then have no body, nor that trailer.
func TestTrailerWithoutABody(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: policyFor(upstream(t, func(http.ResponseWriter, *http.Request) {})), server: []telemetry.ServerOption{telemetry.H2C()}})
	req := r.request(http.MethodGet, "/api", nil, "Trailer", "a b")
	res, err := h2cClient(t).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if e := r.event(); res.StatusCode != http.StatusOK || e.Outcome != events.OutcomeOK {
		t.Errorf("%d, outcome %s", res.StatusCode, e.Outcome)
	}
}

// HTTP/2 knows no upgrades: a client's wish for one is no failure of an upstream that speaks it.
func TestUpgradeToHTTP2(t *testing.T) {
	t.Parallel()
	url := h2cUpstream(t, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusNotFound) })
	r := newRig(t, rigConfig{policy: withUpstream(policyFor(url), "http2: true")})
	conn := r.raw("GET /api HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	if res, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || res.StatusCode != http.StatusNotFound {
		t.Errorf("%+v, %v", res, err)
	}
	if e := r.event(); e.Outcome != events.OutcomeOK || e.Status != http.StatusNotFound {
		t.Errorf("event %+v", e)
	}
}

// HTTP/1.0 has no informational answers.
func TestNothingInformationalInHTTP10(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Link", "</a>")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusOK)
	})
	r := newRig(t, rigConfig{policy: policyFor(url)})
	for version, want := range map[string]int{"1.0": 200, "1.1": 103} {
		conn := r.raw("GET /api HTTP/" + version + "\r\nHost: h\r\n\r\n")
		if res, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || res.StatusCode != want {
			t.Errorf("HTTP/%s: %+v, %v, want %d", version, res, err, want)
		}
	}
}

// A status that is none is the upstream's fault.
func TestNoStatus(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: policyFor(rawUpstream(t, "HTTP/1.1 000 None\r\nContent-Length: 2\r\nX-Theirs: 1\r\n\r\nok"))})
	res, body := r.get("/api")
	problemOf(t, res, body, http.StatusBadGateway)
	if res.Header.Get("X-Theirs") != "" {
		t.Errorf("the refused answer's header was sent: %v", res.Header)
	}
	if e := r.event(); e.Outcome != events.OutcomeReset {
		t.Errorf("outcome %s", e.Outcome)
	}
	if strings.Contains(r.log.String(), "panicked") {
		t.Error(r.log)
	}
}

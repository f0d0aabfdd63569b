package proxy_test

import (
	"bufio"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/telemetry"
)

// Any head that net/http takes for a request gets one answer: no panic, numbers that are numbers,
// a client that is known by its key or its address, and one event where it was forwarded.
func FuzzRequestHead(f *testing.F) {
	for _, head := range []string{
		"GET /api HTTP/1.1\r\nHost: x\r\nX-API-Key: alice\r\n\r\n",
		"POST /api//..//api/%2e%2e HTTP/1.1\r\nHost: [::1]:80\r\nAuthorization: bearer \t alice\r\nContent-Length: 3\r\n\r\nabc",
		"OPTIONS /api HTTP/1.1\r\nHost: x\r\nOrigin: https://app.example.com\r\nAccess-Control-Request-Method: PUT\r\nAccess-Control-Request-Headers: a,b\r\n\r\n",
		"GET http://other/api?x=;&%zz HTTP/1.0\r\nX-Forwarded-For: 1.1.1.1, \xff\r\nX-Request-Id: a b\r\n\r\n",
		"PUT /api HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTrailer: X-A, X-API-Key\r\nConnection: X-API-Key\r\n\r\n1\r\na\r\n0\r\nX-A: b\r\n\r\n",
		"GET /api HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nExpect: 100-continue\r\n\r\n",
		"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", "CONNECT x:1 HTTP/1.1\r\nHost: x:1\r\n\r\n",
	} {
		f.Add(head)
	}
	r := newRig(f, rigConfig{
		policy: policyFor("http://127.0.0.1:1", "capacity: 100000000", "refill_rate: 1", "headers: [ratelimit, x-ratelimit, ietf]",
			"cors: {allowed_origins: ['https://app.example.com']}"),
		trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
		server:  []telemetry.ServerOption{telemetry.H2C()},
	})
	f.Fuzz(func(t *testing.T, head string) {
		req, err := http.ReadRequest(bufio.NewReader(strings.NewReader(head)))
		if err != nil {
			return
		}
		req.RemoteAddr = "10.0.0.1:1234"
		answer := httptest.NewRecorder()
		r.handler.ServeHTTP(answer, req)
		h := answer.Result().Header
		if answer.Code < 200 || answer.Code == http.StatusInternalServerError || strings.Contains(r.log.String(), "panicked") {
			t.Fatalf("%d for %q\n%s", answer.Code, head, r.log)
		}
		for name, values := range h {
			if strings.HasSuffix(strings.ToLower(name), "-remaining") {
				if n, err := strconv.ParseInt(values[0], 10, 64); err != nil || n < 0 || len(values) > 1 {
					t.Fatalf("%s: %q", name, values)
				}
			}
			if strings.EqualFold(name, "RateLimit-Policy") { // the recorder keeps the spelling
				structured(t, http.Header{"X": values}, "X")
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		for range len(r.records) {
			<-r.added
		}
		if len(r.records) > 1 {
			t.Fatalf("%d events of %q", len(r.records), head)
		}
		for _, e := range r.records {
			if len(e.Client) > 64 || e.Client != "user:alice" && !strings.HasPrefix(e.Client, "ip:") || len(e.ID) > 64 {
				t.Fatalf("event %+v of %q", e, head)
			}
		}
		r.records = nil
	})
}

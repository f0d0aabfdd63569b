package proxy_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/netip"
	"net/textproto"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// edgeHeaders are the edge's own headers of an answer.
func edgeHeaders(h http.Header) map[string]string {
	got := make(map[string]string)
	for name, values := range h {
		if strings.Contains(name, "Ratelimit") || name == "Retry-After" || name == "X-Graceful-Degradation" {
			got[name] = strings.Join(values, "|")
		}
	}
	return got
}

// Each row of headers stands for one more request of the same client; capacity 5 has a grace of 1.
func TestHeadersExact(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, _ *http.Request) {})
	fixed := map[string]string{"X-Ratelimit-Algorithm": "token_bucket", "X-Ratelimit-Adaptive-Multiplier": "1.0"}
	type row struct {
		status int
		want   map[string]string
	}
	green := func(remaining, reset string) row {
		return row{200, map[string]string{"Ratelimit-Limit": "5", "Ratelimit-Remaining": remaining, "Ratelimit-Reset": reset, "X-Ratelimit-Tier": "green"}}
	}
	// 2 tokens a second: an empty bucket of 5 is full after 2.5 s, and has a token after 0.5 s.
	rows := []row{
		green("4", "1"), green("3", "1"), green("2", "2"), green("1", "2"), green("0", "3"),
		{202, map[string]string{"Ratelimit-Limit": "5", "Ratelimit-Remaining": "0", "Ratelimit-Reset": "3", "Retry-After": "1", "X-Ratelimit-Tier": "yellow", "X-Graceful-Degradation": "Deferred"}},
		{429, map[string]string{"Ratelimit-Limit": "5", "Ratelimit-Remaining": "0", "Ratelimit-Reset": "3", "Retry-After": "1", "X-Ratelimit-Tier": "red"}},
	}
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 2")})
	for i, row := range rows {
		res, body := r.get("/api", "X-API-Key", "alice")
		for name, v := range fixed {
			row.want[name] = v
		}
		if diff := cmp.Diff(row.want, edgeHeaders(res.Header)); res.StatusCode != row.status || diff != "" {
			t.Errorf("request %d: status %d, want %d; headers (-want +got):\n%s%s", i, res.StatusCode, row.status, diff, body)
		}
		switch row.status {
		case 202:
			if !strings.Contains(body, "runs when the limit allows") || res.Header.Get("Content-Type") != "application/json" {
				t.Errorf("a yellow answer must say that it has not run: %s", body)
			}
		case 429:
			p := problemOf(t, res, body, 429)
			if p.Type != "https://iana.org/assignments/http-problem-types#quota-exceeded" || p.Limit != "api" || p.Route != "api" || p.Tier != "red" || p.RetryAfter != 1 || len(p.Violated) != 1 {
				t.Errorf("problem: %+v", p)
			}
		}
	}
	for range 5 {
		if e := r.event(); e.Outcome != events.OutcomeOK || e.Client != "user:alice" {
			t.Errorf("event %+v", e)
		}
	}
	r.noEvent() // refusals are no events
}

// Names come spelled as documented, whether the upstream answers or the edge refuses.
func TestSpelling(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, _ *http.Request) {})
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 1", "refill_rate: 1")})
	for _, status := range []string{"200 OK", "429 Too Many Requests"} {
		c := r.raw("GET /api HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		answer, err := io.ReadAll(c)
		if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 "+status) {
			t.Fatalf("want %s, got %v\n%s", status, err, answer)
		}
		for _, name := range []string{"RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset", "X-RateLimit-Tier", "X-RateLimit-Algorithm", "X-RateLimit-Adaptive-Multiplier"} {
			if !strings.Contains(string(answer), "\r\n"+name+": ") {
				t.Errorf("%s: no header spelled %s:\n%s", status, name, answer)
			}
		}
	}
}

func TestHeadersOfOtherDecisions(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, _ *http.Request) {})
	for _, test := range []struct {
		name    string
		route   []string
		key     string
		m       int64
		prepare func(r *rig)
		status  int
		want    map[string]string
	}{
		{
			name: "admin", route: []string{"capacity: 1", "refill_rate: 1"}, key: "root", status: 200,
			want: map[string]string{"X-Ratelimit-Exempt": "admin"},
		},
		{
			name: "shadow", route: []string{"capacity: 1", "refill_rate: 0.5", "shadow_mode: true"}, status: 200,
			prepare: func(r *rig) { r.get("/api") },
			want: map[string]string{
				"Ratelimit-Limit": "1", "Ratelimit-Remaining": "0", "Ratelimit-Reset": "2", "X-Ratelimit-Tier": "red",
				"X-Ratelimit-Algorithm": "token_bucket", "X-Ratelimit-Adaptive-Multiplier": "1.0", "X-Ratelimit-Shadow-Exceeded": "true",
			},
		},
		{
			name: "unwell upstream", route: []string{"capacity: 10", "refill_rate: 1"}, m: 850_000, status: 200,
			want: map[string]string{
				"Ratelimit-Limit": "8", "Ratelimit-Remaining": "7", "Ratelimit-Reset": "2", "X-Ratelimit-Tier": "green",
				"X-Ratelimit-Algorithm": "token_bucket", "X-Ratelimit-Adaptive-Multiplier": "0.85",
			},
		},
		{
			name: "sliding window", route: []string{"sliding_limit: 10", "window_seconds: 10", "algorithm: sliding_window"}, status: 200,
			want: map[string]string{
				"Ratelimit-Limit": "10", "Ratelimit-Remaining": "9", "Ratelimit-Reset": "11", "X-Ratelimit-Tier": "green",
				"X-Ratelimit-Algorithm": "sliding_window", "X-Ratelimit-Adaptive-Multiplier": "1.0",
			},
		},
		{
			name: "cost above capacity", route: []string{"capacity: 3", "refill_rate: 1", "cost: 4"}, status: 429,
			want: map[string]string{"X-Ratelimit-Tier": "red", "X-Ratelimit-Algorithm": "token_bucket", "X-Ratelimit-Adaptive-Multiplier": "1.0"},
		},
		{
			name: "cost above reduced capacity", route: []string{"capacity: 10", "refill_rate: 1", "cost: 5"}, m: 200_000, status: 429,
			want: map[string]string{"X-Ratelimit-Tier": "red", "X-Ratelimit-Algorithm": "token_bucket", "X-Ratelimit-Adaptive-Multiplier": "0.2", "Retry-After": "6"},
		},
		{
			name: "no limit", route: []string{"cost: 1"}, status: 200,
			want: map[string]string{"X-Ratelimit-Tier": "green", "X-Ratelimit-Algorithm": "token_bucket", "X-Ratelimit-Adaptive-Multiplier": "1.0"},
		},
		{name: "closed", route: []string{"deny: true"}, status: 403, want: map[string]string{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigConfig{policy: policyFor(url, test.route...)})
			if test.m > 0 {
				r.engine.Multipliers.Set("up", test.m, 0)
			}
			if test.prepare != nil {
				test.prepare(r)
			}
			res, body := r.get("/api", "X-API-Key", test.key)
			if diff := cmp.Diff(test.want, edgeHeaders(res.Header)); res.StatusCode != test.status || diff != "" {
				t.Errorf("status %d, want %d; headers (-want +got):\n%s%s", res.StatusCode, test.status, diff, body)
			}
			if test.status >= 400 {
				problemOf(t, res, body, test.status)
			}
		})
	}
}

// Case 4: the refusals that differ from a used-up quota say so by their type.
func TestProblemTypes(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: policyFor("http://127.0.0.1:1", "capacity: 10", "refill_rate: 1", "cost: 11")})
	res, body := r.get("/api")
	if p := problemOf(t, res, body, 429); p.Type != "urn:aegisrate:problem:cost-exceeds-capacity" || p.RetryAfter != 0 || p.Limit != "api" {
		t.Errorf("%+v", p)
	}
	r.use(policyFor("http://127.0.0.1:1", "capacity: 10", "refill_rate: 1", "cost: 9"))
	r.engine.Multipliers.Set("up", 500_000, 0)
	res, body = r.get("/api")
	if p := problemOf(t, res, body, 429); p.Type != "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity" || p.RetryAfter != 8 {
		t.Errorf("%+v", p)
	}
	res, body = r.get("/elsewhere")
	if p := problemOf(t, res, body, 404); p.Type != "about:blank" {
		t.Errorf("%+v", p)
	}
	res, body = newRig(t, rigConfig{}).get("/api")
	problemOf(t, res, body, 503)
	if res.Header.Get("Retry-After") != "1" {
		t.Error("503 without Retry-After")
	}
	r.noEvent()
}

// What an upstream says under the edge's names never reaches a client, by whatever way; the
// edge's own can't be removed by the upstream's Connection header.
func TestXRateLimitAndXEdgeOfUpstreams(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		for _, name := range []string{
			"RateLimit-Limit", "RateLimit-Policy", "RateLimit", "X-RateLimit-Remaining", "X-RateLimit-Tier", "X-RateLimit-Shadow-Exceeded",
			"X-Edge-Secret", "X-Compute-Cost", "X-Graceful-Degradation", "X-Request-Id",
		} {
			h.Set(name, "999")
		}
		h.Set("Link", "</style.css>")
		w.WriteHeader(http.StatusEarlyHints)
		h.Set("Retry-After", "77") // the upstream's own business
		h.Add("Connection", "RateLimit-Limit, X-RateLimit-Tier, X-Request-Id, X-Hop")
		h.Set("X-Hop", "1")
		h.Set("Trailer", "X-Compute-Cost, X-Checksum")
		w.WriteHeader(http.StatusOK)
		h.Set("X-Compute-Cost", "998")
		h.Set("X-Checksum", "ok")
		h.Set(http.TrailerPrefix+"X-RateLimit-Late", "997")
	})
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 1")})
	var hints http.Header
	req := r.request(http.MethodGet, "/api", nil)
	req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(_ int, h textproto.MIMEHeader) error { hints = http.Header(h).Clone(); return nil },
	}))
	res, _ := r.do(req)
	want := map[string]string{
		"Ratelimit-Limit": "5", "Ratelimit-Remaining": "4", "Ratelimit-Reset": "1", "X-Ratelimit-Tier": "green",
		"X-Ratelimit-Algorithm": "token_bucket", "X-Ratelimit-Adaptive-Multiplier": "1.0", "Retry-After": "77",
	}
	if diff := cmp.Diff(want, edgeHeaders(res.Header)); diff != "" {
		t.Errorf("headers (-want +got):\n%s", diff)
	}
	for _, name := range []string{"X-Edge-Secret", "X-Compute-Cost", "X-Hop", "X-Graceful-Degradation"} {
		if v := res.Header.Get(name); v != "" {
			t.Errorf("%s: %s", name, v)
		}
	}
	if id := res.Header.Values("X-Request-Id"); len(id) != 1 || id[0] == "999" {
		t.Errorf("request id %q", id)
	}
	if diff := cmp.Diff(http.Header{"X-Checksum": {"ok"}}, res.Trailer); diff != "" {
		t.Errorf("trailers (-want +got):\n%s", diff)
	}
	if hints.Get("Link") == "" || len(edgeHeaders(hints)) > 0 || hints.Get("X-Compute-Cost") != "" || hints.Get("X-Edge-Secret") != "" {
		t.Errorf("early hints: %v", hints)
	}
	if e := r.event(); e.ComputeCost != "999" {
		t.Errorf("cost %q; the head's counts", e.ComputeCost)
	}
}

// A hostile cost goes to the settler as it is, to be judged there, and never to the client.
func TestXComputeCost(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("9", 100)
	for _, test := range []struct {
		name string
		sent []string
		want string
	}{
		{"none", nil, ""},
		{"a number", []string{"12.5"}, "12.5"},
		{"not a number", []string{"NaN"}, "NaN"},
		{"infinite", []string{"Inf"}, "Inf"},
		{"negative", []string{"-5"}, "-5"},
		{"overflow", []string{"1e309"}, "1e309"},
		{"hexadecimal", []string{"0x1p4"}, "0x1p4"},
		{"digits in groups", []string{"1_000"}, "1_000"},
		{"two lines are no number", []string{"1", "2"}, "1, 2"},
		{"two in a line", []string{"1, 2"}, "1, 2"},
		{"too long stays too long", []string{long}, long[:64]},
		{"long and then a number", []string{long, "1"}, long[:64]},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			url := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
				for _, v := range test.sent {
					w.Header().Add("X-Compute-Cost", v)
				}
			})
			r := newRig(t, rigConfig{policy: policyFor(url)})
			res, _ := r.get("/api")
			if got := r.event().ComputeCost; got != test.want {
				t.Errorf("event has %q, want %q", got, test.want)
			}
			if v := res.Header.Values("X-Compute-Cost"); v != nil {
				t.Errorf("the client saw %q", v)
			}
			r.use(policyFor(url, "expose_compute_cost: true"))
			res, _ = r.get("/api")
			if diff := cmp.Diff(test.sent, res.Header.Values("X-Compute-Cost")); diff != "" {
				t.Errorf("exposed (-sent +got):\n%s", diff)
			}
		})
	}
}

// What the upstream gets to see of a client's headers.
func TestUpstreamSees(t *testing.T) {
	t.Parallel()
	var seen http.Header
	var host, uri string
	url := upstream(t, func(_ http.ResponseWriter, r *http.Request) { seen, host, uri = r.Header.Clone(), r.Host, r.RequestURI })
	loopback := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	for _, test := range []struct {
		name    string
		trusted []netip.Prefix
		send    []string
		want    map[string]string // "" means absent
		client  string
	}{
		{
			name: "untrusted peer", client: "ip:127.0.0.1",
			send: []string{"X-Forwarded-For", "1.1.1.1", "X-Forwarded-Proto", "https", "X-Forwarded-Host", "evil", "Forwarded", "for=1.1.1.1", "X-Real-Ip", "1.1.1.1", "X-Request-Id", "mine",
				"X-Forwarded-Prefix", "/evil", "X-Forwarded-Port", "1", "X-Forwarded-Tls-Client-Cert", "forged", "X_Forwarded_For", "1.1.1.1", "X-Real_IP", "1.1.1.1"},
			want: map[string]string{"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "http", "X-Forwarded-Host": "edge.test", "Forwarded": "", "X-Real-Ip": "",
				"X-Forwarded-Prefix": "", "X-Forwarded-Port": "", "X-Forwarded-Tls-Client-Cert": "", "X_forwarded_for": "", "X-Real_ip": ""},
		},
		{
			name: "trusted peer", trusted: loopback, client: "ip:203.0.113.7",
			send: []string{"X-Forwarded-For", "1.1.1.1, 203.0.113.7", "X-Forwarded-Proto", "https", "X-Forwarded-Host", "www.test", "Forwarded", "for=203.0.113.7", "X-Real-Ip", "203.0.113.7", "X-Request-Id", "mine", "X-Forwarded-Prefix", "/app", "X_Forwarded_For", "6.6.6.6"},
			want: map[string]string{"X-Forwarded-Prefix": "/app", "X_forwarded_for": "", "X-Forwarded-For": "1.1.1.1, 203.0.113.7, 127.0.0.1", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "www.test", "Forwarded": "for=203.0.113.7", "X-Real-Ip": "203.0.113.7", "X-Request-Id": "mine"},
		},
		{
			name: "trusted peer with a hostile request id", trusted: loopback, client: "ip:127.0.0.1",
			send: []string{"X-Request-Id", "a b"},
			want: map[string]string{},
		},
		{
			name: "the edge's names", client: "ip:127.0.0.1",
			send: []string{"X-RateLimit-Tier", "green", "RateLimit-Policy", "x", "X-Edge-Route", "x", "X-Compute-Cost", "0", "X-Custom", "kept"},
			want: map[string]string{"X-Ratelimit-Tier": "", "Ratelimit-Policy": "", "X-Edge-Route": "", "X-Compute-Cost": "", "X-Custom": "kept"},
		},
		{
			name: "a verified key ends at the edge", client: "user:alice",
			send: []string{"X-API-Key", "alice"},
			want: map[string]string{"X-Api-Key": ""},
		},
		{
			name: "an unknown key may be the upstream's", client: "ip:127.0.0.1",
			send: []string{"X-API-Key", "upstream's"},
			want: map[string]string{"X-Api-Key": "upstream's"},
		},
		{
			name: "authorization goes on", client: "user:alice",
			send: []string{"Authorization", "Bearer alice", "X-API-Key", "upstream's"},
			want: map[string]string{"Authorization": "Bearer alice", "X-Api-Key": "upstream's"},
		},
		{
			name: "a key can't be hidden as hop-by-hop", client: "user:alice",
			send: []string{"X-API-Key", "alice", "Connection", "X-API-Key, X-Forwarded-For, X-Request-Id", "X-Custom", "kept"},
			want: map[string]string{"X-Api-Key": "", "X-Forwarded-For": "127.0.0.1", "X-Custom": "kept"},
		},
		{
			name: "the user agent is the client's", client: "ip:127.0.0.1",
			send: []string{"User-Agent", ""},
			want: map[string]string{"User-Agent": ""},
		},
	} {
		t.Run(test.name, func(t *testing.T) { // one after the other: they share what was seen
			r := newRig(t, rigConfig{policy: policyFor(url + "/base"), trusted: test.trusted})
			req := r.request(http.MethodGet, "/api/a%2Fb?x=1;y=%zz&z", nil, test.send...)
			req.Host = "edge.test"
			res, body := r.do(req)
			if res.StatusCode != 200 {
				t.Fatalf("%d: %s", res.StatusCode, body)
			}
			for name, v := range test.want {
				if got := strings.Join(seen.Values(name), "|"); got != v {
					t.Errorf("%s: %q, want %q", name, got, v)
				}
			}
			if id := seen.Get("X-Request-Id"); id == "" || id != res.Header.Get("X-Request-Id") || len(seen.Values("X-Request-Id")) != 1 {
				t.Errorf("request id %q, the client's %q", seen.Values("X-Request-Id"), res.Header.Get("X-Request-Id"))
			} else if e := r.event(); e.ID != id || e.Client != test.client {
				t.Errorf("event of %s with id %s, want %s with %s", e.Client, e.ID, test.client, id)
			}
			if host != "edge.test" || uri != "/base/api/a%2Fb?x=1;y=%zz&z" {
				t.Errorf("asked %s for %s", host, uri)
			}
		})
	}
}

// Keys reach neither logs nor events nor metrics.
func TestKeysStaySecret(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, _ *http.Request) {})
	r := newRig(t, rigConfig{policy: policyFor(url), access: 1})
	const secret = "s3cr3t-unknown"
	r.get("/api?key="+secret, "X-API-Key", secret, "Authorization", "Bearer "+secret)
	r.get("/api", "X-API-Key", "alice")
	events := []events.Response{r.event(), r.event()}
	families, err := r.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "two access log lines", func() bool { return strings.Count(r.log.String(), `"message":"request"`) == 2 })
	for what, text := range map[string]string{"log": r.log.String(), "events": fmt.Sprint(events), "metrics": fmt.Sprint(families)} {
		if strings.Contains(text, secret) || strings.Contains(strings.ReplaceAll(text, "user:alice", ""), "alice") {
			t.Errorf("a key in the %s: %s", what, text)
		}
	}
}

// X-Forwarded-For: a client that invents addresses stays in its one bucket. Only what a trusted proxy adds
// on the right counts.
func TestXForwardedForIsNoFreshBucket(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(http.ResponseWriter, *http.Request) {})
	doc := policyFor(url, "capacity: 100", "refill_rate: 0.001")
	direct := newRig(t, rigConfig{policy: doc})
	behind := newRig(t, rigConfig{policy: doc, trusted: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}})
	for n := range 20 {
		spoofed := fmt.Sprintf("1.1.1.%d", n)
		res, _ := direct.get("/api", "X-Forwarded-For", spoofed, "X-Real-Ip", spoofed, "Forwarded", "for="+spoofed)
		if got := res.Header.Get("RateLimit-Remaining"); got != fmt.Sprint(99-n) || direct.event().Client != "ip:127.0.0.1" {
			t.Errorf("spoofed to the edge: %s remaining", got)
		}
		for i, lines := range [][]string{{spoofed + ", 203.0.113.7"}, {spoofed, "203.0.113.7"}, {spoofed + ",::ffff:203.0.113.7"}} {
			var header []string
			for _, line := range lines {
				header = append(header, "X-Forwarded-For", line)
			}
			res, _ := behind.get("/api", header...)
			if got := res.Header.Get("RateLimit-Remaining"); got != fmt.Sprint(99-3*n-i) || behind.event().Client != "ip:203.0.113.7" {
				t.Errorf("spoofed through a proxy, %q: %s remaining", lines, got)
			}
		}
	}
}

// What is left is what a client then gets: no more, and no less.
func TestRemainingIsTrue(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(http.ResponseWriter, *http.Request) {})
	for _, quota := range [][]string{
		{"capacity: 9", "refill_rate: 0.5"},
		{"capacity: 9", "refill_rate: 0.5", "cost: 2"},
		{"sliding_limit: 9", "window_seconds: 60", "algorithm: sliding_window"},
	} {
		r := newRig(t, rigConfig{policy: policyFor(url, quota...)})
		cost := 1
		if strings.Contains(strings.Join(quota, " "), "cost: 2") {
			cost = 2
		}
		left := -1
		for n := 0; ; n++ {
			res, _ := r.get("/api")
			said, err := strconv.Atoi(res.Header.Get("RateLimit-Remaining"))
			if err != nil || left >= 0 && (res.StatusCode == 200) != (left >= cost) {
				t.Fatalf("%v: %d to request %d, though %d were left", quota, res.StatusCode, n, left)
			}
			if res.StatusCode != 200 {
				break
			}
			if left >= 0 && said != left-cost {
				t.Errorf("%v: %d left after %d", quota, said, left)
			}
			left = said
		}
	}
}

// Hop-by-hop fields end at the edge, in both directions, those that Connection names among them.
func TestHopByHopFields(t *testing.T) {
	t.Parallel()
	var seen http.Header
	url := listen(t, func(c net.Conn) {
		req, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		seen = req.Header
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive, X-Mine\r\nX-Mine: 1\r\nKeep-Alive: timeout=5\r\n"+
			"Proxy-Authenticate: Basic\r\nProxy-Connection: close\r\nUpgrade: h2c\r\nX-End: 1\r\n\r\nok")
		c.Close()
	})
	r := newRig(t, rigConfig{policy: policyFor(url)})
	in := bufio.NewReader(r.raw("GET /api HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, X-Theirs, close-not\r\nX-Theirs: 1\r\nKeep-Alive: timeout=5\r\n" +
		"Proxy-Authorization: Basic eA==\r\nProxy-Connection: keep-alive\r\nTE: gzip, trailers\r\nUpgrade: h2c\r\nX-End: 1\r\n\r\n"))
	res, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(res.Body); err != nil || string(body) != "ok" || res.Close {
		t.Errorf("%q, %v; the client's connection ends: %t", body, err, res.Close)
	}
	for _, name := range []string{"Connection", "X-Theirs", "X-Mine", "Keep-Alive", "Proxy-Authorization", "Proxy-Authenticate", "Proxy-Connection", "Upgrade"} {
		if v, ok := seen[name]; ok {
			t.Errorf("the upstream got %s: %q", name, v)
		}
		if v, ok := res.Header[name]; ok {
			t.Errorf("the client got %s: %q", name, v)
		}
	}
	if seen.Get("X-End") != "1" || res.Header.Get("X-End") != "1" || seen.Get("Te") != "trailers" {
		t.Errorf("the rest is lost: %v, %v", seen, res.Header)
	}
}

// Connections are kept on both sides: a hundred requests in a row use one and one.
func TestKeepAlive(t *testing.T) {
	t.Parallel()
	var conns atomic.Int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) }))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			conns.Add(1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	r := newRig(t, rigConfig{policy: policyFor(s.URL)})
	c := keepAlive(t)
	reused := 0
	for n := range 100 {
		req := r.request(http.MethodPost, "/api", strings.NewReader(strings.Repeat("x", n)))
		req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
			if i.Reused {
				reused++
			}
		}}))
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(res.Body); err != nil || len(got) != n {
			t.Fatalf("request %d: %d bytes, %v", n, len(got), err)
		}
		res.Body.Close()
		r.event()
	}
	if reused != 99 || conns.Load() != 1 {
		t.Errorf("the client's connection was used %d times again, the upstream had %d", reused, conns.Load())
	}
}

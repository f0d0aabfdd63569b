package proxy_test

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
)

const origin = "https://app.example.com"

// countingStore counts its checks.
type countingStore struct {
	store.Store
	checks atomic.Int64
}

func (s *countingStore) Check(ctx context.Context, c store.Check) (store.Decision, error) {
	s.checks.Add(1)
	return s.Store.Check(ctx, c)
}

func access(h http.Header) map[string]string {
	got := make(map[string]string)
	for name, values := range h {
		if rest, ok := strings.CutPrefix(name, "Access-Control-"); ok {
			got[rest] = strings.Join(values, "|")
		}
	}
	return got
}

// Preflights are answered by the edge: nothing is charged, no store is asked, no upstream sees them.
func TestPreflightsAreFree(t *testing.T) {
	t.Parallel()
	var seen atomic.Int64
	url := upstream(t, func(http.ResponseWriter, *http.Request) { seen.Add(1) })
	counted := &countingStore{Store: memstore.New(func() int64 { return testTime })}
	r := newRig(t, rigConfig{store: counted, policy: policyFor(url, "capacity: 1", "refill_rate: 0.001", "methods: [PUT]",
		"cors: {allowed_origins: ['"+origin+"', 'https://*.example.org'], allow_credentials: true, max_age_seconds: 120}")})
	allowed := map[string]string{
		"Allow-Origin": origin, "Allow-Methods": "PUT", "Allow-Headers": "content-type,x-api-key", "Allow-Credentials": "true", "Max-Age": "120",
	}
	for _, test := range []struct {
		name, origin, method, headers string
		want                          map[string]string
	}{
		{"allowed", origin, "PUT", "content-type,x-api-key", allowed},
		{"by pattern", "https://a.example.org", "PUT", "", map[string]string{"Allow-Origin": "https://a.example.org", "Allow-Methods": "PUT", "Allow-Credentials": "true", "Max-Age": "120"}},
		{"another origin", "https://evil.example", "PUT", "", map[string]string{}},
		{"an origin that ends alike", "https://app.example.com.evil", "PUT", "", map[string]string{}},
		{"another header", origin, "PUT", "x-evil", map[string]string{}},
	} {
		header := []string{"Origin", test.origin, "Access-Control-Request-Method", test.method}
		if test.headers != "" {
			header = append(header, "Access-Control-Request-Headers", test.headers)
		}
		for range 3 {
			res, body := r.do(r.request(http.MethodOptions, "/api", nil, header...))
			if diff := cmp.Diff(test.want, access(res.Header)); res.StatusCode != 204 || diff != "" {
				t.Errorf("%s: %d (-want +got)\n%s%s", test.name, res.StatusCode, diff, body)
			}
			if vary := strings.Join(res.Header.Values("Vary"), ", "); !strings.Contains(vary, "Origin") {
				t.Errorf("%s: Vary: %s", test.name, vary)
			}
		}
	}
	if n := counted.checks.Load(); n != 0 || seen.Load() != 0 {
		t.Errorf("%d checks, %d requests of the upstream", n, seen.Load())
	}
	r.noEvent()
	if res, _ := r.do(r.request(http.MethodPut, "/api", nil, "Origin", origin)); res.StatusCode != 200 || res.Header.Get("RateLimit-Remaining") != "0" {
		t.Errorf("the request itself: %d", res.StatusCode)
	}
}

// Every answer to a page of an allowed origin can be read by it, whoever made the answer, and
// what the upstream says of origins does not count.
func TestAnswersCarryCORS(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", "https://evil.example")
		w.Header().Set("Access-Control-Allow-Private-Network", "true")
		w.Header().Set("Vary", "Accept")
		w.Header().Set("Link", "</a.css>")
		w.WriteHeader(http.StatusEarlyHints)
		io.WriteString(w, "ok")
	})
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 0.01", "max_body_bytes: 10",
		"cors: {allowed_origins: ['"+origin+"'], expose_headers: [X-Total]}")})
	check := func(what string, res *http.Response, status int) {
		t.Helper()
		if res.StatusCode != status {
			t.Errorf("%s: %d, want %d", what, res.StatusCode, status)
		}
		got := access(res.Header)
		exposed := strings.FieldsFunc(got["Expose-Headers"], func(c rune) bool { return c == ',' || c == ' ' || c == '|' })
		for _, name := range []string{"Ratelimit-Limit", "Ratelimit-Remaining", "Ratelimit-Reset", "Retry-After", "Ratelimit", "Ratelimit-Policy", "X-Ratelimit-Tier", "X-Request-Id", "X-Total"} {
			if !slices.ContainsFunc(exposed, func(e string) bool { return strings.EqualFold(e, name) }) {
				t.Errorf("%s: %s is not exposed: %v", what, name, exposed)
			}
		}
		delete(got, "Expose-Headers")
		if diff := cmp.Diff(map[string]string{"Allow-Origin": origin}, got); diff != "" {
			t.Errorf("%s (-want +got)\n%s", what, diff)
		}
		if !strings.Contains(strings.Join(res.Header.Values("Vary"), ", "), "Origin") {
			t.Errorf("%s: Vary %q", what, res.Header.Values("Vary"))
		}
	}
	res, _ := r.do(r.request(http.MethodPost, "/api", strings.NewReader("more than ten bytes"), "Origin", origin))
	check("too large", res, 413)
	for range 5 {
		res, _ = r.get("/api", "Origin", origin)
		check("the upstream's answer", res, 200)
		if !slices.Contains(res.Header.Values("Vary"), "Accept") {
			t.Errorf("the upstream's Vary is lost: %q", res.Header.Values("Vary"))
		}
	}
	res, _ = r.get("/api", "Origin", origin)
	check("yellow", res, 202)
	res, _ = r.get("/api", "Origin", origin)
	check("red", res, 429)

	res, _ = r.get("/api", "Origin", "https://evil.example")
	if got := access(res.Header); len(got) > 0 {
		t.Errorf("another origin may read: %v", got)
	}

	r.use(policyFor("http://127.0.0.1:1", "capacity: 5", "refill_rate: 1", "cors: {allowed_origins: ['*'], expose_headers: [X-Total]}"))
	res, _ = r.get("/api", "Origin", origin, "X-API-Key", "alice")
	if got := access(res.Header); res.StatusCode != 502 || got["Allow-Origin"] != "*" {
		t.Errorf("a new policy's CORS: %d %v", res.StatusCode, got)
	}
}

// A page can read that the service is away, too.
func TestUnavailableCarriesCORS(t *testing.T) {
	t.Parallel()
	reached := make(chan struct{})
	url := upstream(t, func(_ http.ResponseWriter, r *http.Request) {
		close(reached)
		<-r.Context().Done()
	})
	const cors = "cors: {allowed_origins: ['" + origin + "']}"
	drained := newRig(t, rigConfig{policy: policyFor(url, cors)})
	go func() {
		<-reached
		drained.handler.Close(t.Context())
	}()
	closed := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 1", "fallback: closed", cors), store: awayStore{}})
	for name, r := range map[string]*rig{"drained": drained, "closed": closed} {
		res, body := r.get("/api", "Origin", origin)
		problemOf(t, res, body, 503)
		got := access(res.Header)
		if got["Allow-Origin"] != origin || !strings.Contains(strings.ToLower(got["Expose-Headers"]), "retry-after") {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// awayStore can't be reached.
type awayStore struct{ store.Store }

func (awayStore) Check(context.Context, store.Check) (store.Decision, error) {
	return store.Decision{}, store.ErrUnavailable
}

// A route without CORS leaves it to its upstream, preflights too, which are requests like any other.
func TestCORSIsTheUpstreamsWhereTheRouteHasNone(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
		if r.Method == http.MethodOptions {
			w.WriteHeader(http.StatusNoContent)
		}
	})
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 1")})
	for method, status := range map[string]int{http.MethodOptions: 204, http.MethodGet: 200} {
		res, _ := r.do(r.request(method, "/api", nil, "Origin", origin, "Access-Control-Request-Method", "GET"))
		if diff := cmp.Diff(map[string]string{"Allow-Origin": origin}, access(res.Header)); res.StatusCode != status || diff != "" {
			t.Errorf("%s: %d (-want +got)\n%s", method, res.StatusCode, diff)
		}
		r.event()
	}
}

// OPTIONS that is no preflight goes to the upstream whole, CORS or not.
func TestOptionsWithoutAnOriginIsARequest(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "mine") })
	r := newRig(t, rigConfig{policy: policyFor(url, "cors: {allowed_origins: ['*']}")})
	res, body := r.do(r.request(http.MethodOptions, "/api", nil, "Access-Control-Request-Method", "GET"))
	if res.StatusCode != 200 || body != "mine" {
		t.Errorf("%d %q", res.StatusCode, body)
	}
	r.event()
}

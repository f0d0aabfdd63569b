package proxy_test

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
)

// cached is a rig whose route degrades to stored answers. A client has five green requests.
func cached(t *testing.T, up http.HandlerFunc, more ...string) *rig {
	t.Helper()
	more = append([]string{"capacity: 5", "refill_rate: 0.001", "degrade: cache"}, more...)
	return newRig(t, rigConfig{policy: policyFor(upstream(t, up), more...), cache: 8 << 20})
}

// spend takes what is left of a client's limit on something else.
func (r *rig) spend(header ...string) {
	r.t.Helper()
	for range 10 {
		if res, _ := r.do(r.request(http.MethodGet, "/api/else", nil, header...)); res.Header.Get("X-RateLimit-Remaining") == "0" || res.Header.Get("RateLimit-Remaining") == "0" {
			return
		}
	}
	r.t.Fatal("the limit is not used up")
}

const stored = "Served-From-Stale-Cache"

// A yellow GET gets the answer that was stored, with its age; a yellow HEAD its head. They reach no upstream.
func TestYellowGetsTheStoredAnswer(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	r := cached(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "else") {
			w.Header().Set("Cache-Control", "no-store")
			return
		}
		asked.Add(1)
		w.Header().Set("Age", "7")
		w.Header().Set("ETag", `"v1"`)
		w.Header().Set("Retry-After", "9")
		w.Header().Set("X-RateLimit-Limit", "lies")
		fmt.Fprintf(w, "answer %d to %s", asked.Load(), r.URL.RawQuery)
	})
	first, body := r.get("/api/thing?a=1")
	if first.StatusCode != 200 || first.Header.Get("X-Graceful-Degradation") != "" || body != "answer 1 to a=1" {
		t.Fatalf("%s %v %q", first.Status, first.Header, body)
	}
	r.spend()
	res, body := r.get("/api/thing?a=1")
	age, err := strconv.Atoi(res.Header.Get("Age"))
	if res.StatusCode != 200 || body != "answer 1 to a=1" || err != nil || age < 7 || age > 60 ||
		res.Header.Get("X-Graceful-Degradation") != stored || res.Header.Get("X-RateLimit-Tier") != "yellow" ||
		res.Header.Get("ETag") != `"v1"` || res.Header.Get("Retry-After") != "" || res.Header.Get("X-RateLimit-Limit") != "" ||
		res.Header.Get("RateLimit-Limit") != "5" || res.Header.Get("X-Request-Id") == first.Header.Get("X-Request-Id") {
		t.Errorf("%s %v %q", res.Status, res.Header, body)
	}
	if asked.Load() != 1 {
		t.Errorf("the upstream was asked %d times", asked.Load())
	}
}

func TestYellowHeadGetsTheStoredHead(t *testing.T) {
	t.Parallel()
	r := cached(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "body") })
	r.get("/api/thing")
	r.spend()
	res, body := r.do(r.request(http.MethodHead, "/api/thing", nil))
	if res.StatusCode != 200 || body != "" || res.Header.Get("X-Graceful-Degradation") != stored || res.ContentLength != 4 {
		t.Errorf("%s %v %q", res.Status, res.Header, body)
	}
}

// Another client's answer is never given out, nor one to other headers, a private one, or one that was cut short.
func TestStoredAnswersAreNobodyElses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer, first, second []string
	}{
		"another key":       {nil, []string{"X-API-Key", "alice"}, nil},
		"no key":            {nil, nil, []string{"X-API-Key", "alice"}},
		"another cookie":    {nil, []string{"Cookie", "a=1"}, []string{"Cookie", "a=2"}},
		"another authority": {[]string{"Cache-Control", "public"}, []string{"Authorization", "Basic a"}, []string{"Authorization", "Basic b"}},
		"varies":            {[]string{"Vary", "Accept-Language"}, []string{"Accept-Language", "de"}, []string{"Accept-Language", "en"}},
		"private":           {[]string{"Cache-Control", "private"}, nil, nil},
		"no-store":          {[]string{"Cache-Control", "no-store"}, nil, nil},
		"sets a cookie":     {[]string{"Set-Cookie", "a=1"}, nil, nil},
		"broken off":        {[]string{"Content-Length", "100"}, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := cached(t, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/api/thing" {
					for i := 0; i < len(c.answer); i += 2 {
						w.Header().Set(c.answer[i], c.answer[i+1])
					}
				}
				io.WriteString(w, "secret")
			})
			res, err := client.Do(r.request(http.MethodGet, "/api/thing", nil, c.first...))
			if err == nil {
				io.ReadAll(res.Body)
				res.Body.Close()
			}
			r.event()
			r.spend(c.second...)
			res, body := r.get("/api/thing", c.second...)
			if res.Header.Get("X-RateLimit-Tier") != "yellow" || res.Header.Get("X-Graceful-Degradation") == stored || strings.Contains(body, "secret") {
				t.Errorf("%s %v %q", res.Status, res.Header, body)
			}
		})
	}
}

// What an unsafe request changes is forgotten, and what its answer names.
func TestUnsafeMethodsInvalidate(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		method, path string
		status       int
		answer       []string
		forgotten    bool
	}{
		"PUT":              {"PUT", "/api/thing", 204, nil, true},
		"DELETE":           {"DELETE", "/api/thing", 200, nil, true},
		"Location":         {"POST", "/api/things", 201, []string{"Location", "/api/thing"}, true},
		"Content-Location": {"POST", "/api/things", 200, []string{"Content-Location", "thing"}, true},
		"of another host":  {"POST", "/api/things", 201, []string{"Location", "http://other.example/api/thing"}, false},
		"failed":           {"PUT", "/api/thing", 500, nil, false},
		"OPTIONS":          {"OPTIONS", "/api/thing", 200, nil, false},
		"another":          {"PUT", "/api/thing?x", 200, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := cached(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method != http.MethodGet {
					for i := 0; i < len(c.answer); i += 2 {
						w.Header().Set(c.answer[i], c.answer[i+1])
					}
					w.WriteHeader(c.status)
				}
			})
			r.get("/api/thing")
			r.do(r.request(c.method, c.path, nil))
			r.spend()
			res, _ := r.get("/api/thing")
			if got := res.Header.Get("X-Graceful-Degradation") != stored; got != c.forgotten {
				t.Errorf("forgotten: %v; %s %v", got, res.Status, res.Header)
			}
		})
	}
}

// A route that does not ask for it stores nothing.
func TestNothingIsStoredUnasked(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Cache-Control", "public") })
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 0.001"), cache: 8 << 20})
	r.get("/api/thing")
	r.spend()
	if res, _ := r.get("/api/thing"); res.Header.Get("X-RateLimit-Tier") != "yellow" || res.Header.Get("X-Graceful-Degradation") == stored {
		t.Errorf("%s %v", res.Status, res.Header)
	}
}

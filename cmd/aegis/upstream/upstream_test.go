package upstream_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/cmd/aegis/upstream"
)

func TestEndpoints(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(upstream.New())
	t.Cleanup(server.Close)
	cases := []struct {
		path   string
		status int
		cost   string
	}{
		{"/api/fast", 200, ""},
		{"/api/slow?ms=1", 200, ""},
		{"/api/slow?ms=-1", 400, ""},
		{"/api/slow?ms=NaN", 400, ""},
		{"/api/slow?ms=1e300", 400, ""},
		{"/api/fail", 500, ""},
		{"/api/fail?status=418", 418, ""},
		{"/api/fail?status=204", 204, ""},
		{"/api/fail?status=99", 400, ""},
		{"/api/fail?status=500.5", 400, ""},
		{"/api/fail?rate=0", 200, ""},
		{"/api/fail?rate=2", 400, ""},
		{"/api/cost", 200, "5"},
		{"/api/cost?units=10", 200, "10"},
		{"/api/cost?units=NaN", 200, "NaN"},
		{"/api/cost?units=a%0d%0ab", 400, ""},
		{"/api/cost?units=" + strings.Repeat("9", 65), 400, ""},
		{"/api/other", 404, ""},
		{"/healthz", 200, ""},
	}
	for _, c := range cases {
		status, header := get(t, server.URL+c.path)
		if status != c.status || header.Get("X-Compute-Cost") != c.cost {
			t.Errorf("GET %s: %d, cost %q; want %d, cost %q", c.path, status, header.Get("X-Compute-Cost"), c.status, c.cost)
		}
	}
}

func TestControlBreaksAndMends(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(upstream.New())
	t.Cleanup(server.Close)
	for _, c := range []struct {
		body   string
		status int // of the change
		fast   int // of /api/fast afterwards
	}{
		{`{"error_rate":1}`, 200, 503},
		{`{"error_rate":2}`, 400, 503},
		{`{"error_rate":-1}`, 400, 503},
		{`{"latency_ms":60001}`, 400, 503},
		{`{"surprise":1}`, 400, 503},
		{`not JSON`, 400, 503},
		{`{} {}`, 400, 503},
		{`{"latency_ms":1}`, 200, 200},
		{`{}`, 200, 200},
	} {
		res, err := http.Post(server.URL+"/_control", "application/json", strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != c.status {
			t.Errorf("POST %s: %d, want %d", c.body, res.StatusCode, c.status)
		}
		if status, _ := get(t, server.URL+"/api/fast"); status != c.fast {
			t.Errorf("after %s, GET /api/fast: %d, want %d", c.body, status, c.fast)
		}
		if status, _ := get(t, server.URL+"/healthz"); status != 200 {
			t.Errorf("after %s, GET /healthz: %d, want 200", c.body, status)
		}
	}
}

// TestSlowEndsWithItsCaller holds that a caller who leaves frees the handler.
func TestSlowEndsWithItsCaller(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{})
	u := upstream.New()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u.ServeHTTP(w, r)
		close(ended)
	}))
	t.Cleanup(server.Close)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/api/slow?ms=60000", nil)
	if err != nil {
		t.Fatal(err)
	}
	if res, err := http.DefaultClient.Do(req); err == nil {
		res.Body.Close()
		t.Fatal("a request of a minute came back at once")
	}
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("the handler still waits for a caller who left")
	}
}

func get(t *testing.T, url string) (int, http.Header) {
	t.Helper()
	res, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, res.Header
}

package proxy_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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
			if !strings.Contains(body, "was not run") || res.Header.Get("Content-Type") != "application/json" {
				t.Errorf("a yellow answer must say that nothing ran: %s", body)
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

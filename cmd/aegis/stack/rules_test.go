package stack

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
)

// api asks the controlplane, and decodes its answer.
func api(t *testing.T, s *Stack, method, path, body string) map[string]any {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.Controlplane().Addr()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode >= http.StatusMultipleChoices {
		t.Fatalf("%s %s: %d %s, %v", method, path, resp.StatusCode, data, err)
	}
	var v map[string]any
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// TestControlplaneDown: edges serve the last config and the clients they know; an edge that starts afresh
// finds both in NATS; and what an administrator did to a client holds.
func TestControlplaneDown(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t, nil))
	api(t, s, http.MethodPost, "/api/control", `{"routes":{"fast":{"capacity":7}}}`)
	api(t, s, http.MethodPost, "/api/users", `{"name":"ann","plan":"enterprise"}`)
	key := api(t, s, http.MethodPost, "/api/users/ann/keys", `{}`)["key"].(string)
	api(t, s, http.MethodPut, "/api/users/ann/overrides/slow", `{"capacity":11,"refill_rate":1}`)
	api(t, s, http.MethodPost, "/api/users", `{"name":"bea"}`)
	blocked := api(t, s, http.MethodPost, "/api/users/bea/keys", `{}`)["key"].(string)
	api(t, s, http.MethodPost, "/api/clients/user:bea/block", `{}`)
	first := s.Edges()[0]
	holds := func(edge *Node) bool {
		return get(t, edge, "/api/fast", key).header.Get("RateLimit-Limit") == "7" &&
			get(t, edge, "/api/slow?ms=0", key).header.Get("RateLimit-Limit") == "11" &&
			get(t, edge, "/api/fast", blocked).status == http.StatusForbidden
	}
	await(t, soon, "the first edge", func() bool { return holds(first) })

	if err := s.Controlplane().Stop(); err != nil {
		t.Fatal(err)
	}
	await(t, soon, "the first edge without it", func() bool { return holds(first) })
	if err := first.Stop(); err != nil {
		t.Fatal(err)
	}
	again, fresh := addEdge(t, s, "edge-1"), addEdge(t, s, "edge-new")
	await(t, soon, "an edge that was restarted", func() bool { return holds(again) })
	await(t, soon, "an edge that is new", func() bool { return holds(fresh) })
}

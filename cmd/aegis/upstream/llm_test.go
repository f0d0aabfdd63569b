package upstream_test

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/aegisrate/aegisrate/cmd/aegis/upstream"
)

func TestChat(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(upstream.New())
	t.Cleanup(server.Close)
	for _, c := range []struct {
		body   string
		status int
		want   string // in the answer
	}{
		{`{"model":"sample-small","messages":[{"content":"one two"}],"max_tokens":3}`, 200, `"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}`},
		{`{"model":"sample-large","messages":[{"content":"one"}]}`, 200, `"completion_tokens":16`},
		{`{"model":"sample-small","messages":[{"content":"one"}],"max_tokens":2,"stream":true}`, 200, `"delta":{"content":"quick "}`},
		{`{"model":"sample-small","messages":[{"content":"one"}],"max_tokens":2,"stream":true,"stream_options":{"include_usage":true}}`, 200, `"total_tokens":3`},
		{`{"model":"none","messages":[{"content":"one"}]}`, 404, `does not exist`},
		{`{"model":"sample-small","messages":[]}`, 400, `want messages`},
		{`{"model":"sample-small","messages":[{"content":"one"}],"max_tokens":-1}`, 400, `negative`},
		{`no JSON`, 400, `"invalid_request_error"`},
	} {
		res, err := http.Post(server.URL+"/v1/chat/completions", "application/json", strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || res.StatusCode != c.status || !strings.Contains(string(text), c.want) {
			t.Errorf("%s: %d %s, want %d with %s", c.body, res.StatusCode, text, c.status, c.want)
		}
		if !strings.HasPrefix(string(text), "data: ") {
			continue
		}
		lines := bufio.NewScanner(strings.NewReader(string(text)))
		for lines.Scan() {
			event, ok := strings.CutPrefix(lines.Text(), "data: ")
			if ok && event != "[DONE]" && !json.Valid([]byte(event)) {
				t.Errorf("%s", event)
			}
		}
	}
	if status, _ := get(t, server.URL+"/v1/models"); status != 200 {
		t.Errorf("models: %d", status)
	}
}

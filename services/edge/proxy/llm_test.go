package proxy_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// llmPolicy has a route of kind llm at /v1, and alice with these fields.
func llmPolicy(url, alice string, more ...string) string {
	return "upstreams: {up: {url: '" + url + "', timeout_seconds: 5}}\n" +
		"routes:\n  v1:\n    path: /v1\n    upstream: up\n    kind: llm\n    " + strings.Join(more, "\n    ") + "\n" +
		strings.Replace(users, "alice: {", "alice: {"+alice+", ", 1)
}

// call posts a body as alice.
func (r *rig) call(body string, header ...string) (*http.Response, string) {
	r.t.Helper()
	return r.do(r.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body), append(header, "X-API-Key", "alice")...))
}

// tokens waits until alice's counter of tokens stands at want.
func (r *rig) tokens(want int64) {
	r.t.Helper()
	var n int64
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		var err error
		if n, err = r.llm.Shared.Users.Get(context.Background(), "alice_TPM_CURRENT"); err != nil {
			r.t.Fatal(err)
		} else if n == want {
			return
		}
	}
	r.t.Fatalf("%d tokens are counted, want %d", n, want)
}

func (r *rig) calls() int64 {
	r.t.Helper()
	n, err := r.llm.Shared.Users.Get(context.Background(), "alice_RPM_CURRENT")
	if err != nil {
		r.t.Fatal(err)
	}
	return n
}

// sample counts series of a metric with these label values.
func (r *rig) sample(name string, labels ...string) float64 {
	r.t.Helper()
	families, err := r.metrics.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if f.GetName() == name && strings.Join(values, ",") == strings.Join(labels, ",") {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

const (
	callBody   = `{"model":"m","max_tokens":40,"messages":[{"role":"user","content":"eight ch"}]}`               // reserves 44
	callStream = `{"model":"m","max_tokens":40,"stream":true,"messages":[{"role":"user","content":"eight ch"}]}` // too
	answered   = `{"choices":[{"message":{"content":"hi"}}],"usage":{"total_tokens":30}}`
	word       = `data: {"choices":[{"delta":{"content":"word"}}],"usage":null}` + "\n\n"
	usage      = `data: {"choices":[],"usage":{"total_tokens":150}}` + "\n\n"
	done       = "data: [DONE]\n\n"
)

func completion(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("x-ratelimit-limit-tokens", "7") // the upstream's own
	io.WriteString(w, answered)
}

// A call is held to its client's requests and tokens a minute, and refused in the shape that LLM clients know.
func TestLLMQuotas(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: llmPolicy(upstream(t, completion), "rpm: 3, tpm: 100", "capacity: 5", "refill_rate: 0.001")})
	want := func(res *http.Response, fields ...string) {
		t.Helper()
		for i := 0; i < len(fields); i += 2 {
			if got := res.Header.Get(fields[i]); got != fields[i+1] {
				t.Errorf("%s: %q, want %q", fields[i], got, fields[i+1])
			}
		}
	}
	res, body := r.call(callBody)
	if res.StatusCode != 200 || body != answered {
		t.Fatalf("%d %s", res.StatusCode, body)
	}
	// The clock stands at 20 s of its minute.
	want(res, "x-ratelimit-limit-requests", "3", "x-ratelimit-remaining-requests", "2", "x-ratelimit-reset-requests", "40s",
		"x-ratelimit-limit-tokens", "100", "x-ratelimit-remaining-tokens", "56", "x-ratelimit-reset-tokens", "40s", "RateLimit-Remaining", "4")
	r.tokens(30)
	r.event()

	res, body = r.call(strings.Replace(callBody, "40", "90", 1))
	p := problemOf(t, res, body, 429)
	var shaped struct {
		Error struct{ Message, Type, Code string }
		Limit string
	}
	if err := json.Unmarshal([]byte(body), &shaped); err != nil {
		t.Fatal(err)
	}
	if e := shaped.Error; e.Type != "tokens" || e.Code != "rate_limit_exceeded" || !strings.Contains(e.Message, "@tpm") || shaped.Limit != "@tpm" || p.Status != 429 {
		t.Errorf("%s", body)
	}
	want(res, "Retry-After", "40", "RateLimit-Limit", "100", "RateLimit-Remaining", "70", "RateLimit-Reset", "40", "X-RateLimit-Tier", "red",
		"x-ratelimit-remaining-requests", "1", "x-ratelimit-remaining-tokens", "70", "x-ratelimit-reset-tokens", "40s")
	// What the route's bucket was charged goes back.
	if e := r.event(); e.Outcome != events.OutcomeRefused || !e.Refund || len(e.Charges) != 1 || e.Status != 0 {
		t.Errorf("event %+v", e)
	}
	r.tokens(30)

	r.call(callBody)
	r.tokens(60)
	r.call(strings.Replace(callBody, "40", "1", 1))
	r.tokens(90)
	res, body = r.call(strings.Replace(callBody, "40", "1", 1))
	if problemOf(t, res, body, 429); !strings.Contains(body, `"type":"requests"`) || r.calls() != 3 {
		t.Errorf("%d counted; %s", r.calls(), body)
	}
	want(res, "x-ratelimit-remaining-requests", "0")

	// Another client, an admin, and what is no call are not held to it.
	for _, req := range []*http.Request{
		r.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(callBody)),
		r.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(callBody), "X-API-Key", "root"),
	} {
		if res, body := r.do(req); res.StatusCode != 200 || res.Header.Get("x-ratelimit-limit-tokens") != "" {
			t.Errorf("%d %v %s", res.StatusCode, res.Header, body)
		}
	}
	if green, _, red := r.engine.TakeTiers(); green != 4 || red != 2 {
		t.Errorf("tiers: %d green, %d red", green, red)
	}
}

// A call leaves its connection usable.
func TestLLMKeepsConnections(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: llmPolicy(upstream(t, completion), "tpm: 1000")})
	one := fmt.Sprintf("POST /v1 HTTP/1.1\r\nHost: x\r\nX-API-Key: alice\r\nContent-Length: %d\r\n\r\n%s", len(callBody), callBody)
	conn := r.raw(one)
	in := bufio.NewReader(conn)
	for range 3 {
		res, err := http.ReadResponse(in, nil)
		if err != nil || res.Close {
			t.Fatalf("%v, %v", res, err)
		}
		io.Copy(io.Discard, res.Body)
		io.WriteString(conn, one)
	}
}

// What is no call, the list of models for instance, is not held to the quotas of calls.
func TestLLMOnlyCallsCount(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: llmPolicy(upstream(t, completion), "rpm: 1")})
	for range 3 {
		if res, body := r.get("/v1/models", "X-API-Key", "alice"); res.StatusCode != 200 {
			t.Errorf("%d %s", res.StatusCode, body)
		}
	}
}

// Over the route's own limit too the answer is 429, never a lesser one.
func TestLLMIsNeverYellow(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: llmPolicy(upstream(t, completion), "plan: free", "capacity: 5", "refill_rate: 0.001")})
	for i := range 10 {
		want := 200
		if i >= 5 {
			want = 429
		}
		res, body := r.call(callBody)
		if res.StatusCode != want || want == 429 && !strings.Contains(body, `"code":"rate_limit_exceeded"`) {
			t.Fatalf("call %d: %d %s", i, res.StatusCode, body)
		}
	}
}

// In shadow mode what is over a limit passes, marked, and counts nowhere.
func TestLLMShadow(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: llmPolicy(upstream(t, completion), "rpm: 1", "shadow_mode: true")})
	for i := range 3 {
		res, _ := r.call(callBody)
		if marked := res.Header.Get("X-RateLimit-Shadow-Exceeded") == "true"; res.StatusCode != 200 || marked != (i > 0) {
			t.Errorf("call %d: %d, marked %v", i, res.StatusCode, marked)
		}
	}
	if r.calls() != 1 || r.sample("aegis_edge_llm_refused_total", "@rpm", "v1") != 2 {
		t.Errorf("%d counted", r.calls())
	}
}

// A stream passes event by event. Where its client did not ask for usage, the edge does, and takes it out again.
func TestLLMStream(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		body, sent string // by the client, to the upstream
		want       []string
	}{
		"usage is added and taken out": {
			callStream, `{"stream_options":{"include_usage":true},` + callStream[1:],
			[]string{strings.Replace(word, `,"usage":null`, "", 1), strings.Replace(word, `,"usage":null`, "", 1), "", done},
		},
		"usage is the client's wish": {
			callStream[:len(callStream)-1] + `,"stream_options":{"include_usage":true}}`, callStream[:len(callStream)-1] + `,"stream_options":{"include_usage":true}}`,
			[]string{word, word, usage, done},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			next, got := make(chan struct{}), make(chan string, 1)
			url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				got <- fmt.Sprintf("%d %s %s", r.ContentLength-int64(len(body)), r.Header.Get("Accept-Encoding"), body)
				w.Header().Set("Content-Type", "text/event-stream")
				for _, event := range []string{word, word, usage, done} {
					io.WriteString(w, event)
					http.NewResponseController(w).Flush()
					<-next
				}
			})
			r := newRig(t, rigConfig{policy: llmPolicy(url, "tpm: 1000")})
			res, err := client.Do(r.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(c.body), "X-API-Key", "alice", "Accept-Encoding", "gzip"))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			if sent := <-got; sent != "0  "+c.sent {
				t.Errorf("the upstream got %s\nwant %s", sent, c.sent)
			}
			for _, want := range c.want { // the next comes only once this one was read
				event := make([]byte, len(want))
				if _, err := io.ReadFull(res.Body, event); err != nil || string(event) != want {
					t.Fatalf("%q, %v; want %q", event, err, want)
				}
				r.tokens(44)
				next <- struct{}{}
			}
			if rest, err := io.ReadAll(res.Body); len(rest) > 0 || err != nil {
				t.Errorf("%q, %v", rest, err)
			}
			r.tokens(150)
		})
	}
}

// Whatever a body is like, it is forwarded byte for byte.
func TestLLMBodies(t *testing.T) {
	t.Parallel()
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	io.WriteString(z, callStream)
	z.Close()
	huge := `{"model":"m","max_tokens":40,"messages":[{"role":"user","content":"` + strings.Repeat("x", 3<<20) + `"}]}`
	for name, c := range map[string]struct {
		body    string
		chunked bool
		header  []string
		reserve int64
	}{
		"plain":             {callBody, false, nil, 44},
		"chunked":           {callBody, true, nil, 44},
		"gzip":              {zipped.String(), false, []string{"Content-Encoding", "gzip"}, 44},
		"gzip, chunked":     {zipped.String(), true, []string{"Content-Encoding", "gzip"}, 44},
		"gzip that is none": {"{}", false, []string{"Content-Encoding", "gzip"}, 256},
		"huge":              {huge, false, nil, 1024},
		"huge, chunked":     {huge, true, nil, 1024},
		"malformed":         {`{"model": "m", "stream": true, "messages": [}`, false, nil, 257},
		"binary":            {"\x00\xff\x01", false, nil, 256},
		"empty":             {"", false, nil, 256},
		"stream, chunked":   {callStream[:len(callStream)-1] + `,"stream_options":{"include_usage":true}}`, true, nil, 44},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := make(chan string, 1)
			r := newRig(t, rigConfig{policy: llmPolicy(upstream(t, func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				got <- string(body)
				if size := r.ContentLength; (size < 0) != c.chunked || size >= 0 && size != int64(len(body)) {
					t.Errorf("declared %d of %d", size, len(body))
				}
				w.Header().Set("Content-Type", "application/json")
				io.WriteString(w, `{}`)
			}), "tpm: 100000")})
			var body io.Reader = strings.NewReader(c.body)
			if c.chunked {
				body = io.MultiReader(body)
			}
			r.do(r.request(http.MethodPost, "/v1/embeddings", body, append(c.header, "X-API-Key", "alice")...))
			if sent := <-got; sent != c.body {
				t.Errorf("the upstream got %d bytes: %.100q, want %d: %.100q", len(sent), sent, len(c.body), c.body)
			}
			r.tokens(c.reserve) // no usage was told, so that it stays
			r.settled("estimate", 1)
			r.tokens(c.reserve)
		})
	}
}

// A body at the route's bound is not made too large by what the edge adds to it; one above it is refused, in the middle too.
func TestLLMBodyBound(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: llmPolicy(upstream(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		completion(w, r)
	}), "tpm: 1000", fmt.Sprintf("max_body_bytes: %d", len(callStream)), "llm: {inspect_bytes: 1024}")})
	if res, body := r.call(callStream); res.StatusCode != 200 {
		t.Errorf("at the bound: %d %s", res.StatusCode, body)
	}
	res, body := r.do(r.request(http.MethodPost, "/v1", io.MultiReader(strings.NewReader(callStream+" ")), "X-API-Key", "alice"))
	if problemOf(t, res, body, 413); !strings.Contains(body, `"invalid_request_error"`) {
		t.Errorf("%s", body)
	}
}

// A body that stalls before it could be looked into gets 408, and one that breaks off nothing; neither holds tokens.
func TestLLMStalledBody(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: llmPolicy("http://127.0.0.1:1", "rpm: 5, tpm: 1000"), body: 100 * time.Millisecond})
	conn := r.raw("POST /v1 HTTP/1.1\r\nHost: x\r\nX-API-Key: alice\r\nContent-Length: 100\r\n\r\n{\"model\":")
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || res.StatusCode != http.StatusRequestTimeout {
		t.Errorf("%v, %v", res, err)
	}
	if e := r.event(); e.Outcome != events.OutcomeAborted {
		t.Errorf("event %+v", e)
	}
	r.raw("POST /v1 HTTP/1.1\r\nHost: x\r\nX-API-Key: alice\r\nContent-Length: 100\r\n\r\n{\"model\":").Close()
	r.event()
	r.tokens(0)
	if r.calls() != 0 {
		t.Errorf("%d calls counted", r.calls())
	}
}

// However a call ends, it is settled once: by its usage, by what was sent of it, or not at all.
func TestLLMSettlement(t *testing.T) {
	t.Parallel()
	stream := func(parts ...string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for _, part := range parts {
				io.WriteString(w, part)
				http.NewResponseController(w).Flush()
			}
		}
	}
	abort := func(h http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			h(w, r)
			panic(http.ErrAbortHandler)
		}
	}
	answer := func(status int, media, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", media)
			w.WriteHeader(status)
			io.WriteString(w, body)
		}
	}
	for name, c := range map[string]struct {
		upstream http.HandlerFunc // nil: unreachable
		calls    int64
		tokens   int64
		by       string
	}{
		"usage in the stream":      {stream(word, word, usage, done), 1, 150, "usage"},
		"no usage in the stream":   {stream(word, word, done), 1, 44, "estimate"},
		"usage in JSON":            {answer(200, "application/json", answered), 1, 30, "usage"},
		"more sent than reserved":  {stream(strings.Repeat(word, 60), done), 1, 60, "estimate"},
		"no usage in JSON":         {answer(200, "application/json", `{}`), 1, 44, "estimate"},
		"another kind of answer":   {answer(200, "audio/mpeg", "x"), 1, 44, "estimate"},
		"usage not to be believed": {answer(200, "application/json", `{"usage":{"total_tokens":-3}}`), 1, 44, "absurd"},
		"refused by the upstream":  {answer(400, "application/json", `{"error":{}}`), 1, 0, "refund"},
		"failed":                   {answer(503, "application/json", answered), 1, 0, "refund"},
		"unreachable":              {nil, 0, 0, "refund"},
		"reset at once":            {abort(func(http.ResponseWriter, *http.Request) {}), 1, 0, "refund"},
		"reset in the stream":      {abort(stream(word, word, word)), 1, 7, "sent"}, // 4 of the prompt, 3 words
		"reset after the usage":    {abort(stream(word, usage)), 1, 150, "usage"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := "http://127.0.0.1:1"
			if c.upstream != nil {
				url = upstream(t, c.upstream)
			}
			r := newRig(t, rigConfig{policy: llmPolicy(url, "rpm: 5, tpm: 1000")})
			res, err := client.Do(r.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(callStream), "X-API-Key", "alice"))
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, res.Body)
			res.Body.Close()
			r.event()
			r.tokens(c.tokens)
			r.settled(c.by, 1)
			if n := r.calls(); n != c.calls {
				t.Errorf("%d calls are counted, want %d", n, c.calls)
			}
		})
	}
}

// settled waits until so many calls have been settled in that way.
func (r *rig) settled(by string, want float64) {
	r.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if r.sample("aegis_edge_llm_settled_total", by, "v1") == want {
			return
		}
	}
	r.t.Errorf("settled by %s: %v, want %v", by, r.sample("aegis_edge_llm_settled_total", by, "v1"), want)
}

// A client that leaves its stream pays for what was sent, once; the rest of its reserve goes back. An image
// in its prompt, many bytes and few tokens, makes it no debtor.
func TestLLMAbortedStream(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		body           string
		reserved, paid int64
	}{
		"text":  {callStream, 44, 6}, // 4 of the prompt, 2 words
		"image": {strings.Replace(callStream, "eight ch", "data:image/png;base64,"+strings.Repeat("A", 100_000), 1), 1000, 1002},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			left := make(chan struct{})
			url := upstream(t, func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Type", "text/event-stream")
				io.WriteString(w, word+word)
				http.NewResponseController(w).Flush()
				<-r.Context().Done()
				close(left)
			})
			r := newRig(t, rigConfig{policy: llmPolicy(url, "tpm: 1000")})
			ctx, cancel := context.WithCancel(t.Context())
			res, err := client.Do(r.request(http.MethodPost, "/v1/chat/completions", strings.NewReader(c.body), "X-API-Key", "alice").WithContext(ctx))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(res.Body, make([]byte, 10)); err != nil {
				t.Fatal(err)
			}
			r.tokens(c.reserved)
			cancel()
			res.Body.Close()
			<-left
			if e := r.event(); e.Outcome != events.OutcomeAborted {
				t.Errorf("event %+v", e)
			}
			r.tokens(c.paid)
			r.settled("sent", 1)
			r.settled("refund", 0)
		})
	}
}

// A profile bounds the calls of each model, of all clients together, and one that does not exist is told.
func TestLLMProfiles(t *testing.T) {
	t.Parallel()
	profiles := "\nprofiles: {slow: {requestsPerSecond: 1, models: [{model: big, requestsPerSecond: 2}]}, free: {routingStrategy: random}}\n"
	r := newRig(t, rigConfig{policy: llmPolicy(upstream(t, completion), "rpm: 100") + profiles})
	for _, c := range []struct {
		model, profile string
		status         int
	}{
		{"m", "slow", 200}, {"m", "slow", 429}, {"m", "", 200}, {"m", "free", 200}, {"n", "slow", 200},
		{"big", "slow", 200}, {"big", "slow", 200}, {"big", "slow", 429}, {"m", "none", 400},
	} {
		header := []string{"config-profile", c.profile}
		if c.profile == "" {
			header = nil
		}
		res, body := r.call(strings.Replace(callBody, `"m"`, `"`+c.model+`"`, 1), header...)
		if res.StatusCode != c.status {
			t.Errorf("%s under %q: %d %s, want %d", c.model, c.profile, res.StatusCode, body, c.status)
		}
		if c.status == 429 && (!strings.Contains(body, `"@rps"`) || res.Header.Get("x-ratelimit-reset-requests") != "1s" || res.Header.Get("Retry-After") != "1") {
			t.Errorf("%v %s", res.Header, body)
		}
		if c.status == 400 && !strings.Contains(body, "config-profile") {
			t.Errorf("%s", body)
		}
	}
	// Those that a model's bound refused count nowhere.
	if n := r.calls(); n != 6 {
		t.Errorf("%d calls are counted", n)
	}
	// The bound is of all clients together.
	res, body := r.do(r.request(http.MethodPost, "/v1", strings.NewReader(callBody), "config-profile", "slow"))
	problemOf(t, res, body, 429)
}

// A profile's strategy picks among the places of an upstream.
func TestRoutingStrategies(t *testing.T) {
	t.Parallel()
	var served [2]atomic.Int64
	var held atomic.Bool
	release := make(chan struct{})
	place := func(i int) string {
		return upstream(t, func(w http.ResponseWriter, r *http.Request) {
			served[i].Add(1)
			if i == 0 && held.Load() {
				<-release
			}
			completion(w, r)
		})
	}
	doc := strings.Replace(llmPolicy("x", "rpm: 1000"), "url: 'x'", "urls: ['"+place(0)+"', '"+place(1)+"']", 1) +
		"\nprofiles: {turns: {routingStrategy: round-robin}, least: {routingStrategy: least-request}, any: {routingStrategy: random}}\n"
	r := newRig(t, rigConfig{policy: doc})
	calls := func(n int, profile string) (a, b int64) {
		served[0].Store(0)
		served[1].Store(0)
		for range n {
			if res, body := r.call(callBody, "config-profile", profile); res.StatusCode != 200 {
				t.Fatalf("%d %s", res.StatusCode, body)
			}
		}
		return served[0].Load(), served[1].Load()
	}
	if a, b := calls(10, "turns"); a != 5 || b != 5 {
		t.Errorf("round-robin: %d and %d", a, b)
	}
	if a, b := calls(60, "any"); a < 5 || b < 5 {
		t.Errorf("random: %d and %d", a, b)
	}
	// While the first place is busy with a call, all others go to the second.
	held.Store(true)
	served[0].Store(0)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for served[0].Load() == 0 {
			res, err := client.Do(r.request(http.MethodPost, "/v1", strings.NewReader(callBody), "config-profile", "turns"))
			if err != nil {
				t.Error(err)
				return
			}
			res.Body.Close()
		}
	}()
	for deadline := time.Now().Add(10 * time.Second); served[0].Load() == 0 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	if a, b := calls(10, "least"); a != 0 || b != 10 {
		t.Errorf("least-request: %d and %d", a, b)
	}
	close(release)
	<-over
}

// While Redis gives no answer an edge admits its share, and says so.
func TestLLMDegraded(t *testing.T) {
	t.Parallel()
	url := upstream(t, completion)
	r := newRig(t, rigConfig{policy: llmPolicy(url, "rpm: 4")})
	r.engine.Fleet.Heard("another", false, time.Now())
	for range 3 {
		r.engine.Breaker.Debit(admission.Passed, false)
	}
	for i := range 3 {
		res, body := r.call(callBody)
		if want := []int{200, 200, 429}[i]; res.StatusCode != want || res.Header.Get("X-RateLimit-Degraded") != "true" {
			t.Errorf("call %d: %d %v %s", i, res.StatusCode, res.Header, body)
		}
	}
	r.use(llmPolicy(url, "rpm: 4", "fallback: open"))
	if res, body := r.call(callBody); res.StatusCode != 200 {
		t.Errorf("open: %d %s", res.StatusCode, body)
	}
	r.use(llmPolicy(url, "rpm: 40", "fallback: closed"))
	res, body := r.call(callBody)
	if problemOf(t, res, body, 503); res.Header.Get("Retry-After") != "1" || !strings.Contains(body, `"server_error"`) {
		t.Errorf("closed: %v %s", res.Header, body)
	}
}

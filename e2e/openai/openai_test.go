package openai

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/cmd/aegis/stack"
)

// policyText has a user for each scenario and attempt: a minute's budget can't be had twice in a minute.
func policyText() string {
	var b strings.Builder
	b.WriteString(`
upstreams: {sample: {url: "http://127.0.0.1:1", health: {slow_p95_ms: 60000}}}
routes: {llm: {path: /v1, upstream: sample, kind: llm}}
profiles: {slow: {requestsPerSecond: 1}}
users:
`)
	for _, name := range []string{"rpm", "tpm", "stream"} {
		limits := map[string]string{"rpm": "rpm: 3", "tpm": "tpm: 300", "stream": "tpm: 100000"}[name]
		for i := range attempts {
			user := fmt.Sprintf("%s-%d", name, i)
			digest := sha256.Sum256([]byte(user))
			fmt.Fprintf(&b, "  %s: {%s, key_hashes: [%s]}\n", user, limits, hex.EncodeToString(digest[:]))
		}
	}
	return b.String()
}

// attempts bounds how often a scenario is tried that a new minute came in the way of.
const attempts = 4

// inOneMinute runs a scenario as a user whose budget nobody has touched, again where a minute ended under it.
func inOneMinute(t *testing.T, name string, scenario func(user string) (failure string)) {
	t.Helper()
	for i := range attempts {
		minute := time.Now().Unix() / 60
		failure := scenario(fmt.Sprintf("%s-%d", name, i))
		if failure == "" {
			return
		}
		if time.Now().Unix()/60 == minute {
			t.Error(failure)
			return
		}
	}
	t.Errorf("%s: no minute was long enough", name)
}

func start(t *testing.T) *stack.Stack {
	t.Helper()
	const free = "127.0.0.1:0"
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(policyText()), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := stack.Start(t.Context(), stack.Config{
		EdgeAddr: free, ControlAddr: free, NATSAddr: free, UpstreamAddr: free,
		EdgeAdminAddr: free, SettlerAdminAddr: free, HealthwatchAdminAddr: free, ControlAdminAddr: free,
		DataDir: t.TempDir(), Policy: file, Log: zerolog.Nop(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// client is a stock client, as its README makes it; only retries are off, since they would wait for the next minute.
func client(addr, key string) openai.Client {
	return openai.NewClient(option.WithBaseURL("http://"+addr+"/v1/"), option.WithAPIKey(key), option.WithMaxRetries(0))
}

func question(words int64) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:     "sample-small",
		Messages:  []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Say something, please.")},
		MaxTokens: openai.Int(words),
	}
}

func TestStockClient(t *testing.T) {
	s := start(t)
	edge, admin := s.Edges()[0].Addr(), s.Edges()[0].AdminAddr()
	ctx := t.Context()

	t.Run("requests a minute bind", func(t *testing.T) {
		inOneMinute(t, "rpm", func(user string) string {
			c := client(edge, user)
			for i := range 3 {
				var raw *http.Response
				answer, err := c.Chat.Completions.New(ctx, question(4), option.WithResponseInto(&raw))
				if err != nil {
					return err.Error()
				}
				if answer.Choices[0].Message.Content != "the quick brown fox" || answer.Usage.TotalTokens != 7 {
					t.Errorf("answer %s", answer.RawJSON())
				}
				if left := raw.Header.Get("x-ratelimit-remaining-requests"); left != strconv.Itoa(2-i) {
					return "after call " + strconv.Itoa(i) + " there are left: " + left
				}
			}
			_, err := c.Chat.Completions.New(ctx, question(4))
			return refused(err, "requests", "@rpm")
		})
	})

	t.Run("tokens a minute bind, by what was used", func(t *testing.T) {
		inOneMinute(t, "tpm", func(user string) string {
			c := client(edge, user)
			used := metric(t, admin, "aegis_edge_llm_tokens_total", "used")
			// 203 of 300: twice that much is never reserved at once.
			if _, err := c.Chat.Completions.New(ctx, question(200)); err != nil {
				return err.Error()
			}
			await(t, admin, "aegis_edge_llm_tokens_total", "used", used+203)
			_, err := c.Chat.Completions.New(ctx, question(200))
			if failure := refused(err, "tokens", "@tpm"); failure != "" {
				return failure
			}
			_, err = c.Chat.Completions.New(ctx, question(50))
			if err != nil {
				return err.Error()
			}
			return ""
		})
	})

	t.Run("a model's rate binds", func(t *testing.T) {
		c := client(edge, "nobody")
		var limited *openai.Error
		for range 100 { // in one of these seconds two will come
			if _, err := c.Chat.Completions.New(ctx, question(1), option.WithHeader("config-profile", "slow")); errors.As(err, &limited) {
				break
			}
		}
		if limited == nil || limited.StatusCode != 429 || !strings.Contains(limited.Message, "@rps") {
			t.Errorf("no call was above one a second: %v", limited)
		}
	})

	t.Run("streams feel the same", func(t *testing.T) {
		const words = 40
		used := metric(t, admin, "aegis_edge_llm_tokens_total", "used")
		direct := stream(t, client(s.UpstreamAddr(), ""), question(words))
		edged := stream(t, client(edge, "stream-0"), question(words))
		if edged.text != direct.text || edged.chunks != direct.chunks || edged.usage != 0 || direct.usage != 0 {
			t.Errorf("directly: %+v\nby the edge: %+v", direct, edged)
		}
		for name, got := range map[string]heard{"directly": direct, "by the edge": edged} {
			if got.first > got.last/2 {
				t.Errorf("%s the first word came after %v of %v", name, got.first, got.last)
			}
		}
		await(t, admin, "aegis_edge_llm_tokens_total", "used", used+words+3)

		asking := question(5)
		asking.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
		if got := stream(t, client(edge, "stream-0"), asking); got.usage != 8 {
			t.Errorf("who asks for usage gets %+v", got)
		}
	})

	t.Run("a stream that is left", func(t *testing.T) {
		c := client(edge, "stream-0")
		sent := metric(t, admin, "aegis_edge_llm_settled_total", "sent")
		leaving, leave := context.WithCancel(ctx)
		defer leave()
		st := c.Chat.Completions.NewStreaming(leaving, question(4000))
		if !st.Next() {
			t.Fatal(st.Err())
		}
		leave()
		st.Close()
		await(t, admin, "aegis_edge_llm_settled_total", "sent", sent+1)
	})

	t.Run("errors of the upstream pass", func(t *testing.T) {
		q := question(1)
		q.Model = "none"
		_, err := func() (*openai.ChatCompletion, error) {
			c := client(edge, "stream-0")
			return c.Chat.Completions.New(ctx, q)
		}()
		var failed *openai.Error
		if !errors.As(err, &failed) || failed.StatusCode != 404 || !strings.Contains(failed.Message, "does not exist") {
			t.Errorf("%v", err)
		}
		c := client(edge, "stream-0")
		if models, err := c.Models.List(ctx); err != nil || len(models.Data) != 2 {
			t.Errorf("models: %v, %v", models, err)
		}
	})
}

// refused says how err is no refusal of that type by that limit, as the client reads it.
func refused(err error, kind, limit string) string {
	var e *openai.Error
	if !errors.As(err, &e) {
		return fmt.Sprintf("not refused: %v", err)
	}
	after, _ := strconv.Atoi(e.Response.Header.Get("Retry-After"))
	if e.StatusCode != 429 || e.Code != "rate_limit_exceeded" || e.Type != kind || !strings.Contains(e.Message, limit) || after < 1 || after > 60 {
		return fmt.Sprintf("refused by %d, code %q, type %q, %q, retry after %d", e.StatusCode, e.Code, e.Type, e.Message, after)
	}
	return ""
}

// heard is what came of a stream, and when.
type heard struct {
	text        string
	chunks      int
	usage       int64
	first, last time.Duration
}

func stream(t *testing.T, c openai.Client, q openai.ChatCompletionNewParams) heard {
	t.Helper()
	began := time.Now()
	st := c.Chat.Completions.NewStreaming(t.Context(), q)
	defer st.Close()
	var h heard
	for st.Next() {
		chunk := st.Current()
		if h.chunks++; h.chunks == 1 {
			h.first = time.Since(began)
		}
		if chunk.JSON.Usage.Valid() {
			h.usage = chunk.Usage.TotalTokens
		}
		for _, choice := range chunk.Choices {
			h.text += choice.Delta.Content
		}
	}
	if err := st.Err(); err != nil {
		t.Fatal(err)
	}
	h.last = time.Since(began)
	return h
}

// metric is a counter of the edge on route llm, by its other label.
func metric(t *testing.T, admin, name, label string) float64 {
	t.Helper()
	res, err := http.Get("http://" + admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		if line := lines.Text(); strings.HasPrefix(line, name+"{") && strings.Contains(line, `"`+label+`"`) && strings.Contains(line, `route="llm"`) {
			value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
			if err != nil {
				t.Fatal(err)
			}
			return value
		}
	}
	return 0
}

func await(t *testing.T, admin, name, label string, want float64) {
	t.Helper()
	var got float64
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if got = metric(t, admin, name, label); got == want {
			return
		}
	}
	t.Errorf("%s of %s is %v, want %v", name, label, got, want)
}

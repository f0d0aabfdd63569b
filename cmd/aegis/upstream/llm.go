package upstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"
)

// The API speaks as OpenAI's does, of words: each is a token. It answers with max_tokens of them
// (or max_completion_tokens; default 16, at most 4,096), a stream with one word an event, every 20 ms.
const (
	defaultWords = 16
	maxWords     = 4096
	wordPause    = 20 * time.Millisecond
	maxQuestion  = 4 << 20 // bytes
)

// models are those that it has; nobody would tell their answers apart.
var models = []string{"sample-small", "sample-large"}

const words = "the quick brown fox jumps over the lazy dog and"

type chatRequest struct {
	Model    string `json:"model"`
	Messages []struct {
		Content json.RawMessage `json:"content"`
	} `json:"messages"`
	MaxTokens     int  `json:"max_tokens"`
	MaxCompletion int  `json:"max_completion_tokens"`
	Stream        bool `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

func (u *Upstream) models(w http.ResponseWriter, _ *http.Request) {
	list := make([]map[string]any, len(models))
	for i, id := range models {
		list[i] = map[string]any{"id": id, "object": "model", "created": 0, "owned_by": "aegisrate"}
	}
	answer(w, http.StatusOK, map[string]any{"object": "list", "data": list})
}

func (u *Upstream) chat(w http.ResponseWriter, r *http.Request) {
	var q chatRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxQuestion)).Decode(&q); err != nil {
		refuseCall(w, http.StatusBadRequest, fmt.Errorf("the body is no chat completion: %w", err))
		return
	}
	if !slices.Contains(models, q.Model) {
		refuseCall(w, http.StatusNotFound, fmt.Errorf("the model %q does not exist; the models are %s", q.Model, strings.Join(models, ", ")))
		return
	}
	n := max(q.MaxTokens, q.MaxCompletion)
	if n == 0 {
		n = defaultWords
	}
	if min(q.MaxTokens, q.MaxCompletion) < 0 || len(q.Messages) == 0 {
		refuseCall(w, http.StatusBadRequest, errors.New("want messages, and no negative max_tokens"))
		return
	}
	n = min(n, maxWords)
	used := usage{Completion: n}
	for _, m := range q.Messages {
		used.Prompt += len(strings.Fields(string(m.Content)))
	}
	used.Total = used.Prompt + used.Completion

	said := strings.Fields(words)
	if !q.Stream {
		text := make([]string, n)
		for i := range text {
			text[i] = said[i%len(said)]
		}
		doc := completion("chat.completion", q.Model, map[string]any{
			"index": 0, "message": map[string]any{"role": "assistant", "content": strings.Join(text, " ")}, "finish_reason": "stop",
		})
		doc["usage"] = used
		answer(w, http.StatusOK, doc)
		return
	}

	w.Header().Set("Content-Type", "text/event-stream")
	send := func(doc map[string]any) {
		if q.StreamOptions.IncludeUsage && doc["usage"] == nil {
			doc["usage"] = nil // OpenAI's API sends it so
		}
		text, err := json.Marshal(doc)
		if err != nil { // plain texts and numbers always encode
			return
		}
		fmt.Fprintf(w, "data: %s\n\n", text)
		http.NewResponseController(w).Flush()
	}
	const object = "chat.completion.chunk"
	for i := range n {
		if i > 0 && !wait(r, wordPause) {
			return
		}
		delta := map[string]any{"content": said[i%len(said)] + " "}
		if i == 0 {
			delta["role"] = "assistant"
		}
		send(completion(object, q.Model, map[string]any{"index": 0, "delta": delta, "finish_reason": nil}))
	}
	send(completion(object, q.Model, map[string]any{"index": 0, "delta": map[string]any{}, "finish_reason": "stop"}))
	if q.StreamOptions.IncludeUsage {
		doc := completion(object, q.Model)
		doc["usage"] = used
		send(doc)
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

func completion(object, model string, choices ...any) map[string]any {
	if choices == nil {
		choices = []any{}
	}
	return map[string]any{"id": "chatcmpl-sample", "object": object, "created": time.Now().Unix(), "model": model, "choices": choices}
}

func refuseCall(w http.ResponseWriter, status int, err error) {
	answer(w, status, map[string]any{"error": map[string]any{"message": err.Error(), "type": "invalid_request_error", "param": nil, "code": nil}})
}

package llm

import (
	"bytes"
	"compress/gzip"
	"io"
	"strings"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

// maxTokens is the greatest number of tokens that is believed, of a request and of an answer.
const maxTokens = policy.MaxPerWindow

// bytesPerToken is the usual rule of thumb for text.
const bytesPerToken = 4

// Call is what a request's body says of the call. What could not be seen is zero.
type Call struct {
	Model string
	// MaxTokens bounds the answer, all choices together; 0 where the body names no bound.
	MaxTokens int64
	// Prompt estimates the tokens of what is sent.
	Prompt int64
	// Stream says that the answer is to come as server-sent events.
	Stream bool
	// AsksUsage says that the client wants usage in its stream.
	AsksUsage bool

	usage splice
}

// splice puts text in the place of body[from:to], where it is not empty.
type splice struct {
	from, to int
	text     string
}

// Inspect reads the beginning of a request's body, whole where that is all of it. encoding is its
// Content-Encoding; of the known ones gzip is read, up to limit bytes of what is in it. length is
// the body's, negative where it is not known.
func Inspect(body []byte, whole bool, encoding string, length int64, limit int64) Call {
	switch strings.ToLower(strings.TrimSpace(encoding)) {
	case "", "identity":
		c := inspect(body, whole)
		if rest := length - int64(len(body)); rest > 0 {
			c.Prompt = min(c.Prompt+rest/bytesPerToken, maxTokens)
		}
		return c
	case "gzip", "x-gzip":
		z, err := gzip.NewReader(bytes.NewReader(body))
		if err != nil {
			return Call{}
		}
		plain, err := io.ReadAll(io.LimitReader(z, limit)) // what can be had before an error is looked at
		c := inspect(plain, whole && err == nil)
		c.usage = splice{} // the body is forwarded as it came
		return c
	default:
		return Call{Prompt: min(max(length, int64(len(body)))/bytesPerToken, maxTokens)}
	}
}

func inspect(body []byte, whole bool) Call {
	var c Call
	var choices int64 = 1
	var texts int       // bytes
	var chat bool       // an API that knows stream_options.include_usage
	options := splice{} // where include_usage goes
	var s *scanner
	s = newScanner(func(e event) {
		if e == text {
			texts += s.size
		}
		switch s.depth() {
		case 0:
			if e == opened && body[s.start] == '{' {
				options = splice{s.at + 1, s.at + 1, `"stream_options":{"include_usage":true},`}
			}
		case 1:
			switch string(s.key(1)) {
			case "model":
				if e == text {
					c.Model, _ = s.string()
				}
			case "max_tokens", "max_completion_tokens", "max_output_tokens":
				c.MaxTokens = max(c.MaxTokens, s.bound(e))
			case "n":
				choices = max(1, s.bound(e))
			case "stream":
				c.Stream = e == literal && string(s.token) == "true"
			case "messages", "prompt":
				chat = true
			case "stream_options":
				switch {
				case e == literal: // null
					options = splice{s.start, s.at, `{"include_usage":true}`}
				case e == opened && body[s.start] == '{':
					options = splice{s.at + 1, s.at + 1, `"include_usage":true,`}
				case e == closed && len(bytes.TrimSpace(body[options.from:s.at-1])) == 0: // nothing stands in it
					options.text = `"include_usage":true`
				}
			}
		case 2:
			if string(s.key(1)) == "stream_options" && string(s.key(2)) == "include_usage" {
				c.AsksUsage = e == literal && string(s.token) == "true"
				options = splice{s.start, s.at, "true"}
			}
		}
	})
	s.Write(body)
	if s.in == '"' && !s.isKey {
		texts += s.size // of which the end is not seen
	}
	c.Prompt = min(int64(texts+bytesPerToken-1)/bytesPerToken, maxTokens)
	c.MaxTokens = times(c.MaxTokens, choices)
	if whole && s.over && len(bytes.TrimSpace(body[s.at:])) == 0 && c.Stream && !c.AsksUsage && chat {
		c.usage = options
	}
	return c
}

// bound is the literal visited as a number of tokens: what is no whole number of them is 0, and
// what is too great to be believed the greatest that is.
func (s *scanner) bound(e event) int64 {
	if e != literal {
		return 0
	}
	if n, ok := s.integer(maxTokens); ok {
		return n
	}
	if s.size > 0 && strings.Trim(string(s.token), "0123456789") == "" {
		return maxTokens
	}
	return 0
}

// times is a × b, at most maxTokens; both are in [0, maxTokens].
func times(a, b int64) int64 { return min(a*b, maxTokens) }

// AddUsage is body with stream_options.include_usage set, and whether that differs: only where a
// client streams, did not ask for usage itself, and the body could be seen whole. Every other byte stays.
func (c Call) AddUsage(body []byte) (_ []byte, added bool) {
	if c.usage.text == "" {
		return body, false
	}
	out := make([]byte, 0, len(body)+len(c.usage.text))
	out = append(out, body[:c.usage.from]...)
	out = append(out, c.usage.text...)
	return append(out, body[c.usage.to:]...), true
}

// Reserve is the tokens to hold for the call until its usage is known: its prompt and the answer that it
// may get, capped, and never more than tpm, the client's whole budget (0: unlimited).
func (c Call) Reserve(rules *policy.LLM, tpm int64) int64 {
	answer := c.MaxTokens
	if answer == 0 {
		answer = rules.DefaultTokens
	}
	reserve := min(c.Prompt+answer, rules.MaxReserve)
	if tpm > 0 {
		reserve = min(reserve, tpm)
	}
	return max(1, reserve)
}

package llm

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

const limit = 1 << 20

func TestInspect(t *testing.T) {
	t.Parallel()
	chat := `{"model":"m","max_tokens":40,"messages":[{"role":"user","content":"eight ch"}],"stream":true}`
	for name, c := range map[string]struct {
		body string
		want Call
	}{
		"chat":               {chat, Call{Model: "m", MaxTokens: 40, Prompt: 4, Stream: true}}, // m, user, eight ch: 13 bytes
		"usage asked for":    {`{"stream_options":{"include_usage":true},"stream":true}`, Call{Stream: true, AsksUsage: true}},
		"usage not wanted":   {`{"stream":true,"stream_options":{"include_usage":false}}`, Call{Stream: true}},
		"completion tokens":  {`{"max_completion_tokens":7,"max_tokens":3}`, Call{MaxTokens: 7}},
		"output tokens":      {`{"max_output_tokens":9}`, Call{MaxTokens: 9}},
		"several choices":    {`{"n":3,"max_tokens":5}`, Call{MaxTokens: 15}},
		"hostile":            {`{"max_tokens":999999999999999999999,"n":99999999999}`, Call{MaxTokens: maxTokens}},
		"negative":           {`{"max_tokens":-5}`, Call{}},
		"fraction":           {`{"max_tokens":5.5}`, Call{}},
		"exponent":           {`{"max_tokens":1e9}`, Call{}},
		"text for a number":  {`{"max_tokens":"40"}`, Call{Prompt: 1}},
		"null":               {`{"max_tokens":null,"model":null,"stream":null}`, Call{}},
		"the last one holds": {`{"model":"a","model":"b","stream":true,"stream":false}`, Call{Model: "b", Prompt: 1}},
		"the greatest holds": {`{"max_tokens":900,"max_tokens":1}`, Call{MaxTokens: 900}},
		"not at the top":     {`{"x":{"model":"a","max_tokens":1},"messages":[{"max_tokens":9,"stream":true}]}`, Call{Prompt: 1}},
		"escapes":            {`{"\u006dodel":"a\"\\\u00e9","max_\u0074okens":2}`, Call{Model: `a"\é`, MaxTokens: 2, Prompt: 3}},
		"long model":         {`{"model":"` + strings.Repeat("x", 300) + `"}`, Call{Prompt: 75}},
		"white space":        {" \r\n\t{ \"model\" :\t\"m\" ,\n\"max_tokens\" : 4 } ", Call{Model: "m", MaxTokens: 4, Prompt: 1}},
		"a list":             {`[{"model":"m"}]`, Call{Prompt: 1}},
		"a number":           {`5`, Call{}},
		"empty":              {``, Call{}},
		"cut off":            {`{"model":"m","max_tokens":40,"messages":[{"content":"abcdefgh`, Call{Model: "m", MaxTokens: 40, Prompt: 3}},
		"cut in a number":    {`{"max_tokens":4`, Call{}},
		"malformed":          {`{"model":"m" "max_tokens":4}`, Call{Model: "m", Prompt: 1}},
		"brackets crossed":   {`{"a":[}`, Call{}},
		"too deep":           {strings.Repeat("[", 10_000) + `{"model":"m"}`, Call{}},
	} {
		got := Inspect([]byte(c.body), true, "", int64(len(c.body)), limit)
		if diff := cmp.Diff(c.want, got, cmpopts.IgnoreUnexported(Call{})); diff != "" {
			t.Errorf("%s (-want +got)\n%s", name, diff)
		}
	}
	// What is beyond the bound counts as text, and the rest is not believed to be whole.
	got := Inspect([]byte(chat), false, "Identity", 1013, limit)
	if got.Prompt != 4+(1013-int64(len(chat)))/4 || got.usage.text != "" {
		t.Errorf("a longer body: %+v", got)
	}
}

func TestInspectEncoded(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	fmt.Fprintf(z, `{"model":"m","max_tokens":40,"stream":true,"messages":[{"content":"%s"}]}`, strings.Repeat("a", 4000))
	z.Close()
	whole := b.Bytes()
	got := Inspect(whole, true, "gzip", int64(len(whole)), limit)
	if got.Model != "m" || got.MaxTokens != 40 || got.Prompt < 1000 {
		t.Errorf("gzip: %+v", got)
	}
	if _, added := got.AddUsage(whole); added {
		t.Error("a compressed body was changed")
	}
	if got := Inspect(whole[:len(whole)-20], false, "X-GZIP", -1, limit); got.Model != "m" {
		t.Errorf("gzip cut off: %+v", got)
	}
	if got := Inspect([]byte("{}"), true, "gzip", 2, limit); !reflect.DeepEqual(got, Call{}) {
		t.Errorf("no gzip: %+v", got)
	}
	if got := Inspect([]byte("{\"model\":\"m\"}"), true, "br", 13, limit); got.Model != "" || got.Prompt != 3 {
		t.Errorf("another encoding: %+v", got)
	}

	b.Reset()
	z = gzip.NewWriter(&b)
	fmt.Fprintf(z, `{"prompt":"%s"}`, strings.Repeat("a", 8<<20)) // 8 MiB in 8 KiB
	z.Close()
	if got := Inspect(b.Bytes(), true, "gzip", -1, 1<<16); got.Prompt > 1<<16/4 {
		t.Errorf("a bomb was read to its end: %+v", got)
	}
}

func TestAddUsage(t *testing.T) {
	t.Parallel()
	const add = `"stream_options":{"include_usage":true}`
	for body, want := range map[string]string{
		`{"stream":true,"messages":[]}`:                                                   `{` + add + `,"stream":true,"messages":[]}`,
		` { "prompt":"x","stream":true}`:                                                  ` {` + add + `, "prompt":"x","stream":true}`,
		`{"messages":[],"stream_options":{},"stream":true}`:                               `{"messages":[],"stream_options":{"include_usage":true},"stream":true}`,
		`{"messages":[],"stream_options":{ ` + "\n" + `},"stream":true}`:                  `{"messages":[],"stream_options":{"include_usage":true ` + "\n" + `},"stream":true}`,
		`{"messages":[],"stream_options":{"a":1},"stream":true}`:                          `{"messages":[],"stream_options":{"include_usage":true,"a":1},"stream":true}`,
		`{"messages":[],"stream_options":{"include_usage":false,"b":{}},"stream":true}`:   `{"messages":[],"stream_options":{"include_usage":true,"b":{}},"stream":true}`,
		`{"messages":[],"stream_options":null,"stream":true}`:                             `{"messages":[],"stream_options":{"include_usage":true},"stream":true}`,
		`{"messages":[],"stream":true,"stream_options":{"include_usage":true}}`:           "",
		`{"messages":[],"stream":false}`:                                                  "",
		`{"messages":[]}`:                                                                 "",
		`{"input":"x","stream":true}`:                                                     "", // another API, which refuses the option
		`{"messages":[],"stream":true`:                                                    "", // cut off
		`{"messages":[],"stream":true,}}`:                                                 "",
		`[{"messages":[],"stream":true}]`:                                                 "",
		`{"messages":[{"stream_options":{"include_usage":true}}],"stream":true,"x":1.50}`: `{` + add + `,"messages":[{"stream_options":{"include_usage":true}}],"stream":true,"x":1.50}`,
	} {
		got, added := Inspect([]byte(body), true, "", int64(len(body)), limit).AddUsage([]byte(body))
		if want == "" {
			want = body
		}
		if string(got) != want || added != (want != body) {
			t.Errorf("%s\n became %s, added %v\n want   %s", body, got, added, want)
		}
	}
}

// Reserve is bounded by what the call names, the cap, the default and the client's budget.
func TestReserve(t *testing.T) {
	t.Parallel()
	rules := &policy.LLM{DefaultTokens: 256, MaxReserve: 1024}
	for _, c := range []struct {
		call      Call
		tpm, want int64
	}{
		{Call{Prompt: 10}, 2000, 266},
		{Call{Prompt: 10, MaxTokens: 40}, 2000, 50},
		{Call{Prompt: 10, MaxTokens: 999_999_999}, 2000, 1024},
		{Call{Prompt: maxTokens, MaxTokens: maxTokens}, 0, 1024},
		{Call{Prompt: 10, MaxTokens: 999_999_999}, 100, 100},
		{Call{}, 1, 1},
	} {
		if got := c.call.Reserve(rules, c.tpm); got != c.want {
			t.Errorf("%+v of %d: %d, want %d", c.call, c.tpm, got, c.want)
		}
	}
}

// FuzzInspect holds the scanner against encoding/json, and what AddUsage makes against what was there.
func FuzzInspect(f *testing.F) {
	f.Add([]byte(`{"model":"m","max_tokens":40,"n":2,"messages":[{"content":"x"}],"stream":true}`), uint16(7))
	f.Add([]byte(`{"stream_options":{"a":[1,{}]},"prompt":"\ud83d\ude00","stream":true,"max_completion_tokens":1}`), uint16(3))
	f.Add([]byte("{\"stream_options\" : null,\"messages\":1,\"stream\":true}\n"), uint16(0))
	f.Fuzz(func(t *testing.T, body []byte, cut uint16) {
		c := Inspect(body, true, "", int64(len(body)), limit)
		if c.MaxTokens < 0 || c.MaxTokens > maxTokens || c.Prompt < 0 || c.Prompt > maxTokens {
			t.Fatalf("out of bounds: %+v", c)
		}
		Inspect(body[:min(int(cut), len(body))], false, "", int64(len(body)), limit)
		Inspect(body, true, "gzip", -1, 1<<12)

		var twin map[string]json.RawMessage
		if !json.Valid(body) || json.Unmarshal(body, &twin) != nil || twin == nil || repeats(body) {
			return
		}
		var model string
		_ = json.Unmarshal(twin["model"], &model)
		if len(model) <= maxScalar/6 && strings.ToValidUTF8(model, "") == model && c.Model != model {
			t.Errorf("model %q, want %q in %s", c.Model, model, body)
		}
		if stream := strings.TrimSpace(string(twin["stream"])) == "true"; c.Stream != stream {
			t.Errorf("stream %v in %s", c.Stream, body)
		}
		out, added := c.AddUsage(body)
		if !added {
			return
		}
		var before, after map[string]any
		if err := json.Unmarshal(out, &after); err != nil {
			t.Fatalf("%s became %s: %v", body, out, err)
		}
		if err := json.Unmarshal(body, &before); err != nil {
			t.Fatal(err)
		}
		options, ok := after["stream_options"].(map[string]any)
		if !ok || options["include_usage"] != true {
			t.Fatalf("%s became %s: usage is not asked for", body, out)
		}
		delete(options, "include_usage")
		was, _ := before["stream_options"].(map[string]any)
		delete(was, "include_usage")
		if len(was) != len(options) || len(was) > 0 && !reflect.DeepEqual(was, options) {
			t.Fatalf("%s became %s: the options are others", body, out)
		}
		delete(before, "stream_options")
		delete(after, "stream_options")
		if !reflect.DeepEqual(before, after) {
			t.Fatalf("%s became %s", body, out)
		}
	})
}

// repeats says that an object at the top or its stream_options has a key twice, for which encoding/json
// and the scanner may have different answers.
func repeats(body []byte) bool {
	dec := json.NewDecoder(bytes.NewReader(body))
	type level struct {
		keys   map[string]bool
		object bool
		key    bool
	}
	var stack []level
	for {
		tok, err := dec.Token()
		if err != nil {
			return false
		}
		top := len(stack) - 1
		if d, ok := tok.(json.Delim); ok && (d == '}' || d == ']') {
			stack = stack[:top]
			continue
		}
		if top >= 0 && stack[top].object {
			if stack[top].key = !stack[top].key; stack[top].key {
				name := strings.ToLower(tok.(string)) // encoding/json ignores case, here it is not used to
				if stack[top].keys[name] {
					return true
				}
				stack[top].keys[name] = true
				continue
			}
		}
		if d, ok := tok.(json.Delim); ok {
			stack = append(stack, level{keys: map[string]bool{}, object: d == '{'})
		}
	}
}

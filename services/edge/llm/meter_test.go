package llm

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
)

const events = "text/event-stream; charset=utf-8"

// chunk is a stream event that brings a word.
func chunk(word string) string {
	return `data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":"` + word + `"},"finish_reason":null}],"usage":null}` + "\n\n"
}

const told = `data: {"id":"c","choices":[],"usage":{"prompt_tokens":100,"completion_tokens":50,"total_tokens":150}}` + "\n\n"

func TestUsage(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		media, body  string
		tokens       int64
		told, absurd bool
		sent         int64
	}{
		"stream":           {events, chunk("one") + chunk("two") + told + "data: [DONE]\n\n", 150, true, false, 2},
		"stream without":   {events, chunk("one") + chunk("two") + "data: [DONE]\n\n", 0, false, false, 2},
		"long pieces":      {events, chunk(strings.Repeat("x", 40)), 0, false, false, 10},
		"cut off":          {events, chunk("one") + `data: {"choices":[{"delta":{"content":"abcd"}`, 0, false, false, 2},
		"crlf":             {events, strings.ReplaceAll(chunk("one")+told, "\n", "\r\n"), 150, true, false, 1},
		"cr":               {events, strings.ReplaceAll(chunk("one")+told, "\n", "\r"), 150, true, false, 1},
		"byte order mark":  {events, "\ufeff" + told, 150, true, false, 0},
		"no space":         {events, "data:{\"usage\":{\"total_tokens\":3}}\n\n", 3, true, false, 0},
		"lines of one":     {events, "event: x\ndata: {\"usage\":\ndata: {\"total_tokens\"\ndata: :7}}\nid: 1\n\n", 7, true, false, 0},
		"lines in crlf":    {events, "data: {\"usage\":\r\ndata: {\"total_tokens\":7}}\r\n\r\n", 7, true, false, 0},
		"comments":         {events, ": data: {\"usage\":{\"total_tokens\":3}}\n\nretry: 5\n\n", 0, false, false, 0},
		"other fields":     {events, "dat: {\"usage\":{\"total_tokens\":3}}\n\ndatax: {\"usage\":{\"total_tokens\":3}}\n\n", 0, false, false, 0},
		"last one holds":   {events, `data: {"usage":{"total_tokens":3}}` + "\n\n" + told, 150, true, false, 0},
		"sum":              {events, `data: {"usage":{"prompt_tokens":3,"completion_tokens":4}}` + "\n\n", 7, true, false, 0},
		"responses API":    {events, "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":3,\"output_tokens\":4}}}\n\n", 7, true, false, 0},
		"responses deltas": {events, "data: {\"type\":\"response.output_text.delta\",\"delta\":\"word\"}\n\n", 0, false, false, 1},
		"broken event":     {events, "data: {\"choices\":[}\n\n" + told, 150, true, false, 0},
		"json":             {"application/json", `{"choices":[{"message":{"content":"abcdefgh"}}],"usage":{"total_tokens":150,"prompt_tokens_details":{"cached_tokens":9}}}`, 150, true, false, 2},
		"json without":     {"application/json", `{"choices":[{"message":{"content":"abcdefgh"}}]}`, 0, false, false, 2},
		"json, usage null": {"application/json", `{"usage":null}`, 0, false, false, 0},
		"embeddings":       {"application/json", `{"data":[{"embedding":[0.1,-2e-3]}],"usage":{"prompt_tokens":8,"total_tokens":8}}`, 8, true, false, 0},
		"negative":         {"application/json", `{"usage":{"total_tokens":-5}}`, 0, false, true, 0},
		"huge":             {"application/json", `{"usage":{"total_tokens":1e309}}`, 0, false, true, 0},
		"beyond belief":    {"application/json", `{"usage":{"total_tokens":1000000001,"prompt_tokens":4}}`, 4, true, true, 0},
		"not the usage":    {"application/json", `{"x":{"usage":{"total_tokens":5}},"messages":[{"usage":{"total_tokens":5}}]}`, 0, false, false, 0},
		"no answer":        {"application/json", ``, 0, false, false, 0},
	} {
		for _, size := range []int{1, 3, 1 << 20} {
			m := NewMeter(c.media)
			for rest := c.body; rest != ""; {
				n := min(size, len(rest))
				m.Write([]byte(rest[:n]))
				rest = rest[n:]
			}
			tokens, told, absurd := m.Usage()
			if tokens != c.tokens || told != c.told || absurd != c.absurd || m.Sent() != c.sent {
				t.Errorf("%s in pieces of %d: %d tokens, told %v, absurd %v, sent %d; want %d, %v, %v, %d",
					name, size, tokens, told, absurd, m.Sent(), c.tokens, c.told, c.absurd, c.sent)
			}
		}
	}
	if NewMeter("image/png") != nil || NewMeter("") != nil {
		t.Error("a picture is metered")
	}
	var none *Meter
	none.Write([]byte("x"))
	if _, told, absurd := none.Usage(); told || absurd || none.Sent() != 0 || none.Stream() {
		t.Error("a nil meter says something")
	}
}

// What is kept of an answer does not grow with it.
func TestMeterKeepsNothing(t *testing.T) {
	big := []byte(`{"a":"` + strings.Repeat("x", 1<<20))
	m := NewMeter("application/json")
	if n := testing.AllocsPerRun(10, func() { m.Write(big) }); n > 0 {
		t.Errorf("%v allocations a MiB", n)
	}
	s := NewMeter(events)
	one := []byte(chunk("word"))
	s.Write(one)
	if n := testing.AllocsPerRun(1000, func() { s.Write(one) }); n > 0 {
		t.Errorf("%v allocations an event", n)
	}
}

func TestStripUsage(t *testing.T) {
	t.Parallel()
	clean := strings.ReplaceAll(chunk("one")+chunk("two"), `,"usage":null`, "")
	long := `data: {"choices":[{"delta":{"content":"` + strings.Repeat("x", 2*maxHeld) + `"}}],"usage":null}` + "\n\n"
	for name, c := range map[string][2]string{
		"usage event":        {chunk("one") + chunk("two") + told + "data: [DONE]\n\n", clean + "data: [DONE]\n\n"},
		"crlf":               {strings.ReplaceAll(chunk("one")+chunk("two")+told, "\n", "\r\n"), strings.ReplaceAll(clean, "\n", "\r\n")},
		"usage with content": {`data: {"usage" : {"total_tokens":3} , "choices":[{"delta":{}}]}` + "\n\n", `data: { "choices":[{"delta":{}}]}` + "\n\n"},
		"usage alone":        {`data: {"usage":{"total_tokens":3}}` + "\n\n", ""},
		"only null":          {`data: {"usage":null}` + "\n\n", `data: {}` + "\n\n"},
		"in the middle":      {`data: {"a":1,"usage":null,"b":2,"choices":[1]}` + "\n\n", `data: {"a":1,"b":2,"choices":[1]}` + "\n\n"},
		"in the content":     {`data: {"choices":[{"delta":{"content":"\"usage\":{}"}}]}` + "\n\n", `data: {"choices":[{"delta":{"content":"\"usage\":{}"}}]}` + "\n\n"},
		"deeper":             {`data: {"choices":[{"usage":{"x":1}}]}` + "\n\n", `data: {"choices":[{"usage":{"x":1}}]}` + "\n\n"},
		"not JSON":           {"data: \"usage\" [\n\n: \"usage\"\n\n", "data: \"usage\" [\n\n: \"usage\"\n\n"},
		"two data lines":     {"data: {\"usage\":\ndata: null}\n\n", "data: {\"usage\":\ndata: null}\n\n"},
		"other fields":       {"event: x\nid: 7\n" + told + chunk("a"), strings.ReplaceAll(chunk("a"), `,"usage":null`, "")},
		"too long to hold":   {long + chunk("one") + told, long + strings.ReplaceAll(chunk("one"), `,"usage":null`, "")},
		"an end without end": {chunk("one") + `data: {"usage":{`, strings.ReplaceAll(chunk("one"), `,"usage":null`, "") + `data: {"usage":{`},
		"empty":              {"", ""},
	} {
		for _, size := range []int{1, 7, 1 << 10, 1 << 20} {
			got, err := io.ReadAll(StripUsage(io.NopCloser(&pieces{data: []byte(c[0]), size: size})))
			if name == "too long to hold" && size >= 2*maxHeld {
				continue // it came whole, so nothing was held back and it was stripped
			}
			if err != nil || string(got) != c[1] {
				t.Errorf("%s in pieces of %d: %v\n got %.200q\nwant %.200q", name, size, err, got, c[1])
			}
		}
	}
	broken := errors.New("broken off")
	got, err := io.ReadAll(StripUsage(io.NopCloser(io.MultiReader(strings.NewReader(clean+"data: {"), failing{broken}))))
	if !errors.Is(err, broken) || string(got) != clean+"data: {" {
		t.Errorf("%q, %v", got, err)
	}
}

// An event leaves in the read that it came in.
func TestStripHoldsNoWholeEvent(t *testing.T) {
	t.Parallel()
	in := make(chan string, 1)
	s := StripUsage(io.NopCloser(channel(in)))
	p := make([]byte, 4096)
	for _, event := range []string{"data: {\"choices\":[1]}\n\n", chunk("one"), ": ping\n\n", chunk("two")} {
		in <- event // a read of more would block for ever
		n, err := s.Read(p)
		if want := strings.ReplaceAll(event, `,"usage":null`, ""); err != nil || string(p[:n]) != want {
			t.Errorf("%q, %v", p[:n], err)
		}
	}
}

type channel chan string

func (c channel) Read(p []byte) (int, error) { return copy(p, <-c), nil }

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// pieces reads so many bytes at a time.
type pieces struct {
	data []byte
	size int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.data) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.data[:min(p.size, len(p.data))])
	p.data = p.data[n:]
	return n, nil
}

// FuzzStream: however a stream is cut into pieces, meter and filter make the same of it; the meter
// agrees with a simple twin, and the filter leaves everything but usage.
func FuzzStream(f *testing.F) {
	f.Add([]byte(chunk("one")+told+"data: [DONE]\n\n"), uint64(1))
	f.Add([]byte(strings.ReplaceAll(chunk("a")+told, "\n", "\r\n")), uint64(2))
	f.Add([]byte("\ufeffdata:{\"usage\":{\"total_tokens\":3},\"choices\":[[]]}\r\r: x\n\n\ndata: {}\n"), uint64(3))
	f.Fuzz(func(t *testing.T, stream []byte, seed uint64) {
		whole := NewMeter(events)
		whole.Write(stream)
		cut := NewMeter(events)
		rnd := rand.New(rand.NewPCG(seed, 0))
		for rest := stream; len(rest) > 0; {
			n := 1 + rnd.IntN(len(rest))
			cut.Write(rest[:n])
			rest = rest[n:]
		}
		a, at, _ := whole.Usage()
		b, bt, _ := cut.Usage()
		if a != b || at != bt || whole.Sent() != cut.Sent() {
			t.Fatalf("whole: %d %v, sent %d; in pieces: %d %v, sent %d", a, at, whole.Sent(), b, bt, cut.Sent())
		}

		one, err := io.ReadAll(StripUsage(io.NopCloser(bytes.NewReader(stream))))
		if err != nil {
			t.Fatal(err)
		}
		many, err := io.ReadAll(StripUsage(io.NopCloser(&pieces{data: stream, size: 1 + rnd.IntN(9)})))
		if err != nil {
			t.Fatal(err)
		}
		if len(stream) < maxHeld && !bytes.Equal(one, many) {
			t.Fatalf("whole: %q\nin pieces: %q", one, many)
		}
		if !bytes.Contains(stream, []byte(`"usage"`)) && !bytes.Equal(one, stream) {
			t.Fatalf("%q became %q", stream, one)
		}
		if len(one) > len(stream) {
			t.Fatalf("%q grew to %q", stream, one)
		}
		// The twin reads what has one payload line an event, in LF.
		if bytes.ContainsAny(stream, "\r") {
			return
		}
		for _, event := range bytes.SplitAfter(stream, []byte("\n\n")) {
			if payload, ok := bytes.CutPrefix(event, []byte("data: ")); ok && json.Valid(payload) && repeats(payload) {
				return // of a member that is there twice, one is cut
			}
		}
		for _, event := range bytes.SplitAfter(one, []byte("\n\n")) {
			payload, ok := bytes.CutPrefix(event, []byte("data: "))
			if !ok || bytes.Count(event, []byte("\n")) != 2 || !json.Valid(payload) {
				continue
			}
			var doc struct {
				Choices []json.RawMessage `json:"choices"`
			}
			var members map[string]json.RawMessage
			if json.Unmarshal(payload, &members) != nil || json.Unmarshal(payload, &doc) != nil || repeats(payload) {
				continue
			}
			if usage, left := members["usage"]; left {
				t.Fatalf("usage %s is left in %q", usage, event)
			}
		}
	})
}

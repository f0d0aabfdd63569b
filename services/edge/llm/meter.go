package llm

import (
	"bytes"
	"mime"
)

// Meter reads the usage off an answer while it passes, and keeps nothing of the answer. A nil one reads nothing.
type Meter struct {
	events bool // server-sent events; else one JSON document
	json   *scanner

	// Of the line under way: how much of "data:" has been seen, or one of the states below it.
	line int
	cr   bool // the last line ended in CR, whose LF may come

	total, in, out int64 // usage as told last; -1: not told
	absurd         bool

	chunks  int64 // events that brought content
	content int64 // its bytes
	brought bool  // the event under way has content
}

const (
	inData    = -1 // the line's payload is read
	skipSpace = -2 // a space after "data:" is no part of it
	ignored   = -3 // another field
)

// NewMeter is for an answer of that Content-Type; nil where it can hold no usage.
func NewMeter(contentType string) *Meter {
	m := &Meter{total: -1, in: -1, out: -1}
	switch media, _, _ := mime.ParseMediaType(contentType); media {
	case "text/event-stream":
		m.events = true
	case "application/json":
	default:
		return nil
	}
	m.json = newScanner(m.visit)
	return m
}

// Write takes the next bytes of the answer; it never fails.
func (m *Meter) Write(p []byte) (int, error) {
	if m == nil {
		return len(p), nil
	}
	if !m.events {
		return m.json.Write(p)
	}
	for i := 0; i < len(p); {
		if m.cr && p[i] == '\n' {
			m.cr = false
			i++
			continue
		}
		m.cr = false
		if m.line == inData || m.line == ignored {
			n := bytes.IndexAny(p[i:], "\r\n")
			if n < 0 {
				n = len(p) - i
			}
			if m.line == inData {
				m.json.Write(p[i : i+n])
			}
			if i += n; i < len(p) {
				m.endLine(p[i])
				i++
			}
			continue
		}
		m.begin(p[i])
		i++
	}
	return len(p), nil
}

// begin takes a byte of the beginning of a line.
func (m *Meter) begin(c byte) {
	const field = "data:"
	switch {
	case c == '\r' || c == '\n':
		if m.line == 0 {
			m.endEvent()
		}
		m.endLine(c)
	case m.line == skipSpace:
		m.line = inData
		if c != ' ' {
			m.json.Write([]byte{c})
		}
	case m.line == 0 && (c == 0xEF || c == 0xBB || c == 0xBF): // a byte order mark
	case c == field[m.line]:
		if m.line++; m.line == len(field) {
			m.line = skipSpace
		}
	default:
		m.line = ignored
	}
}

func (m *Meter) endLine(c byte) {
	if m.line == inData {
		m.json.Write([]byte{'\n'})
	}
	m.line, m.cr = 0, c == '\r'
}

func (m *Meter) endEvent() {
	if m.brought {
		m.chunks++
		m.brought = false
	}
	m.json.reset()
}

func (m *Meter) visit(e event) {
	s := m.json
	switch e {
	case text:
		switch string(s.last()) {
		case "content", "text", "reasoning", "reasoning_content", "refusal", "arguments", "delta":
			m.content += int64(s.size)
			m.brought = m.brought || s.size > 0
		}
	case literal:
		usage := s.depth() == 2 && string(s.key(1)) == "usage" || s.depth() == 3 && string(s.key(1)) == "response" && string(s.key(2)) == "usage"
		if !usage {
			return
		}
		switch string(s.last()) {
		case "total_tokens":
			m.told(&m.total)
		case "prompt_tokens", "input_tokens":
			m.told(&m.in)
		case "completion_tokens", "output_tokens":
			m.told(&m.out)
		}
	}
}

func (m *Meter) told(into *int64) {
	n, ok := m.json.integer(maxTokens)
	if ok {
		*into = n
	}
	m.absurd = m.absurd || !ok
}

// Stream says that the answer is one of events.
func (m *Meter) Stream() bool { return m != nil && m.events }

// Usage is the tokens of the call as the upstream has told them last. absurd says that it told a
// number that can't be believed, which was passed over.
func (m *Meter) Usage() (tokens int64, told, absurd bool) {
	switch {
	case m == nil:
		return 0, false, false
	case m.total >= 0:
		return m.total, true, m.absurd
	case m.in >= 0 || m.out >= 0:
		return min(max(0, m.in)+max(0, m.out), maxTokens), true, m.absurd
	default:
		return 0, false, m.absurd
	}
}

// Sent estimates the tokens of the answer that have passed: a token an event at the least.
func (m *Meter) Sent() int64 {
	if m == nil {
		return 0
	}
	chunks := m.chunks
	if m.brought {
		chunks++
	}
	return min(max(chunks, (m.content+bytesPerToken-1)/bytesPerToken), maxTokens)
}

package llm

import (
	"bytes"
	"encoding/json"
)

const (
	// maxDepth bounds the nesting that is followed; what is deeper makes a document unreadable.
	maxDepth = 256
	// maxPath is how deep keys are told apart, and maxKey how long one may be for that.
	maxPath = 3
	maxKey  = 32
	// maxScalar is how much of a text or number is kept, in bytes.
	maxScalar = 256
)

// event is what a scanner has come across.
type event uint8

const (
	opened  event = iota // an object or a list begins
	closed               // one ends
	text                 // a string
	literal              // a number, true, false or null
)

// scanner reads JSON as it comes and keeps none of it. It checks only what it needs to tell
// where it is; bad says that it no longer knows.
type scanner struct {
	// visit hears of each value; depth is that of the value, 0 at the top.
	visit func(e event)

	at    int // offset of the byte under way
	stack []byte
	want  byte // what comes next: k(ey), c(olon), v(alue), s(eparator); K and V: or the end
	bad   bool
	over  bool // the outermost value has ended

	in      byte // what the byte under way belongs to: 0, " or l(iteral)
	isKey   bool
	escaped bool
	escapes bool // the token has an escape

	// token is the beginning of the text or literal visited, without quotes, escapes as they came;
	// size its length and start the offset of its first byte (a text's quote).
	token []byte
	size  int
	start int

	// keys[d] is the key under way in the object at depth d+1; empty in a list, and where it is too long.
	keys     [maxPath][]byte
	keyStart [maxPath]int
	// recent is the last key at any depth: that of the text or literal visited, where it has one.
	recent []byte
}

// newScanner reads one document.
func newScanner(visit func(event)) *scanner {
	s := &scanner{visit: visit}
	s.reset()
	return s
}

// reset prepares for another document; offsets begin at 0 again.
func (s *scanner) reset() {
	s.at, s.stack, s.want, s.bad, s.over = 0, s.stack[:0], 'v', false, false
	s.in, s.isKey, s.escaped, s.escapes = 0, false, false, false
	for i := range s.keys {
		s.keys[i] = s.keys[i][:0]
	}
}

func (s *scanner) depth() int { return len(s.stack) }

// key is the key at depth d, from 1, of the way to the value visited. It holds until the next visit.
func (s *scanner) key(d int) []byte {
	if d > len(s.stack) || d > maxPath {
		return nil
	}
	return s.keys[d-1]
}

// last is the key of the text or literal visited, empty in a list.
func (s *scanner) last() []byte {
	if !s.object() {
		return nil
	}
	return s.recent
}

// string is the text visited, unescaped; what is longer than maxScalar is not ok.
func (s *scanner) string() (_ string, ok bool) {
	if s.size > maxScalar {
		return "", false
	}
	if !s.escapes {
		return string(s.token), true
	}
	var plain string
	quoted := append(append([]byte{'"'}, s.token...), '"')
	return plain, json.Unmarshal(quoted, &plain) == nil
}

// integer is the literal visited, if it is a whole number from 0 to limit.
func (s *scanner) integer(limit int64) (_ int64, ok bool) {
	var n int64
	for _, c := range s.token {
		if c < '0' || c > '9' || n > limit {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, s.size > 0 && s.size == len(s.token) && n <= limit
}

// Write takes the next bytes of the document; it never fails.
func (s *scanner) Write(p []byte) (int, error) {
	for i := 0; i < len(p) && !s.bad && !s.over; {
		switch s.in {
		case '"':
			i += s.inText(p[i:])
		case 'l':
			i += s.inLiteral(p[i:])
		default:
			s.between(p[i])
			i++
			s.at++
		}
	}
	return len(p), nil
}

func (s *scanner) inText(p []byte) (n int) {
	for n < len(p) {
		if s.escaped {
			s.escaped = false
			s.keep(p[n : n+1])
			n++
			continue
		}
		next := bytes.IndexAny(p[n:], `"\`)
		if next < 0 {
			next = len(p) - n
			s.keep(p[n:])
			n += next
			break
		}
		s.keep(p[n : n+next])
		n += next + 1
		if p[n-1] == '\\' {
			s.escaped, s.escapes = true, true
			s.keep(p[n-1 : n])
			continue
		}
		s.in = 0
		s.at += n
		if s.isKey {
			s.noteKey()
		} else {
			s.value(text)
		}
		return n
	}
	s.at += n
	return n
}

func (s *scanner) inLiteral(p []byte) int {
	for n, c := range p {
		switch c {
		case ' ', '\t', '\r', '\n', ',', ']', '}', ':', '"', '{', '[':
			s.keep(p[:n])
			s.in = 0
			s.at += n
			s.value(literal)
			return n // the byte that ends it is looked at again
		}
	}
	s.keep(p)
	s.at += len(p)
	return len(p)
}

// keep takes bytes of the token under way.
func (s *scanner) keep(p []byte) {
	if room := maxScalar - len(s.token); room > 0 {
		s.token = append(s.token, p[:min(room, len(p))]...)
	}
	s.size += len(p)
}

func (s *scanner) begin(in byte) {
	s.in, s.token, s.size, s.start, s.escapes = in, s.token[:0], 0, s.at, false
}

// between takes a byte outside of texts and literals.
func (s *scanner) between(c byte) {
	switch c {
	case ' ', '\t', '\r', '\n':
		return
	}
	switch {
	case c == '"' && s.want != 'c' && s.want != 's':
		s.isKey = s.want == 'k' || s.want == 'K'
		s.begin('"')
	case c == ':' && s.want == 'c':
		s.want = 'v'
	case c == ',' && s.want == 's' && len(s.stack) > 0:
		if s.want = 'v'; s.object() {
			s.want = 'k'
		}
	case (c == '{' || c == '[') && (s.want == 'v' || s.want == 'V'):
		s.start = s.at
		s.visit(opened)
		if len(s.stack) == maxDepth {
			s.bad = true
			return
		}
		s.stack = append(s.stack, c)
		if d := len(s.stack); d <= maxPath {
			s.keys[d-1] = s.keys[d-1][:0]
		}
		if s.want = 'V'; c == '{' {
			s.want = 'K'
		}
	case c == '}' && s.object() && (s.want == 's' || s.want == 'K'),
		c == ']' && len(s.stack) > 0 && !s.object() && (s.want == 's' || s.want == 'V'):
		s.stack = s.stack[:len(s.stack)-1]
		s.at++ // the value ends behind the bracket
		s.value(closed)
		s.at--
	case (s.want == 'v' || s.want == 'V') && (c == '-' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z'):
		s.begin('l')
		s.keep([]byte{c})
	default:
		s.bad = true
	}
}

// object says that the innermost container is one.
func (s *scanner) object() bool { return len(s.stack) > 0 && s.stack[len(s.stack)-1] == '{' }

func (s *scanner) noteKey() {
	s.want = 'c'
	s.recent = s.recent[:0]
	if !s.escapes && s.size <= maxKey {
		s.recent = append(s.recent, s.token...)
	} else if name, ok := s.string(); ok && len(name) <= maxKey {
		s.recent = append(s.recent, name...)
	}
	if d := len(s.stack); d <= maxPath {
		s.keyStart[d-1] = s.start
		s.keys[d-1] = append(s.keys[d-1][:0], s.recent...)
	}
}

// value ends a value; at is the offset behind it.
func (s *scanner) value(e event) {
	s.want = 's'
	s.visit(e)
	s.over = len(s.stack) == 0
}

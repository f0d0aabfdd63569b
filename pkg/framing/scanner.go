package framing

import "bytes"

// state is what the next byte of a connection is part of.
type state uint8

const (
	requestLine state = iota
	headerLine
	preface // of HTTP/2, after its first line
	body    // of a declared length
	chunkSize
	chunkData
	chunkEnd
	trailerLine
	through // not looked at any more
)

// The HTTP/2 preface is a request that no HTTP/1 client sends.
const (
	prefaceLine = "PRI * HTTP/2.0"
	prefaceRest = "\r\nSM\r\n\r\n"
)

// maxLine bounds how much of a line is kept until its end comes, in bytes. A server with its own
// bound on heads stops reading before.
const maxLine = 64 << 10

// scanner follows the requests of one connection. Its zero value is at the beginning of one.
type scanner struct {
	state state
	// h2 lets a connection begin with the HTTP/2 preface.
	h2    bool
	begun bool // the first line has passed
	// line is the begin of a line whose end has not come.
	line []byte
	// left is how much of a body, a chunk or the preface is still to come, in bytes.
	left uint64

	// What the head under way says of its body.
	old, sized, chunked bool
}

// scan takes the next bytes. It gives how many of them may pass, and why the next line may
// not; "" where all may.
func (s *scanner) scan(p []byte) (n int, refusal string) {
	for n < len(p) {
		switch s.state {
		case through:
			return len(p), ""
		case body, chunkData:
			k := min(uint64(len(p)-n), s.left)
			n += int(k)
			if s.left -= k; s.left > 0 {
				return n, ""
			}
			if s.state == body {
				s.state = requestLine
			} else {
				s.state = chunkEnd
			}
			continue
		case preface:
			if p[n] != prefaceRest[len(prefaceRest)-int(s.left)] {
				return n, "an HTTP/2 preface that is none"
			}
			n++
			if s.left--; s.left == 0 {
				s.state = through
			}
			continue
		}
		end := bytes.IndexByte(p[n:], '\n') + 1
		if end == 0 {
			if len(s.line)+len(p)-n > maxLine {
				return n, "a line without an end"
			}
			s.line = append(s.line, p[n:]...)
			return len(p), ""
		}
		line := p[n : n+end]
		if len(s.line) > 0 {
			s.line = append(s.line, line...)
			line = s.line
		}
		if refusal := s.take(line); refusal != "" {
			return n, refusal
		}
		s.line = s.line[:0]
		n += end
	}
	return n, ""
}

// take takes a whole line, its end included.
func (s *scanner) take(line []byte) (refusal string) {
	if cr := bytes.IndexByte(line, '\r'); cr < 0 {
		return "a bare line feed"
	} else if cr != len(line)-2 {
		return "a bare carriage return"
	}
	line = line[:len(line)-2]
	switch s.state {
	case requestLine:
		return s.request(line)
	case headerLine:
		if len(line) == 0 {
			s.endHead()
			return ""
		}
		return s.header(line)
	case chunkSize:
		return s.chunk(line)
	case chunkEnd:
		if len(line) > 0 {
			return "a chunk of another size than declared"
		}
		s.state = chunkSize
	case trailerLine:
		if len(line) == 0 {
			s.state = requestLine
			return ""
		}
		name, _, refusal := field(line)
		if refusal == "" && (is(name, "content-length") || is(name, "transfer-encoding")) {
			return "a trailer that frames"
		}
		return refusal
	}
	return ""
}

// request takes a request line.
func (s *scanner) request(line []byte) (refusal string) {
	if len(line) == 0 {
		return "" // some clients send one after a body; net/http knows where to take it
	}
	first := !s.begun
	s.begun = true
	if first && s.h2 && string(line) == prefaceLine {
		s.state, s.left = preface, uint64(len(prefaceRest))
		return ""
	}
	const version = " HTTP/1."
	at := len(line) - len(version) - 1
	if at < 0 || string(line[at:at+len(version)]) != version || bytes.Count(line, []byte{' '}) != 2 {
		return "no request line of HTTP/1"
	}
	switch line[len(line)-1] {
	case '1':
	case '0':
		s.old = true
	default:
		return "no request line of HTTP/1"
	}
	s.state = headerLine
	return ""
}

// header takes a line of a head.
func (s *scanner) header(line []byte) (refusal string) {
	name, value, refusal := field(line)
	switch {
	case refusal != "":
		return refusal
	case is(name, "content_length") || is(name, "transfer_encoding"):
		return "a name that many upstreams take for one that frames"
	case is(name, "content-length"):
		if s.sized || s.chunked {
			return "more than one Content-Length, or one with Transfer-Encoding"
		}
		s.sized = true
		return s.length(value)
	case is(name, "transfer-encoding"):
		switch {
		case s.sized || s.chunked:
			return "more than one Transfer-Encoding, or one with Content-Length"
		case s.old:
			return "Transfer-Encoding in HTTP/1.0"
		case string(value) != "chunked":
			return "a Transfer-Encoding other than chunked"
		}
		s.chunked = true
	}
	return ""
}

// endHead takes the empty line after a head.
func (s *scanner) endHead() {
	switch {
	case s.chunked:
		s.state = chunkSize
	case s.left > 0:
		s.state = body
	default:
		s.state = requestLine
	}
	s.old, s.sized, s.chunked = false, false, false
}

// length takes the value of a Content-Length.
func (s *scanner) length(digits []byte) (refusal string) {
	if len(digits) == 0 || len(digits) > 18 {
		return "a Content-Length that is none"
	}
	s.left = 0
	for _, c := range digits {
		if c < '0' || c > '9' {
			return "a Content-Length that is none"
		}
		s.left = s.left*10 + uint64(c-'0')
	}
	return ""
}

// chunk takes the line before a chunk. Extensions are allowed and mean nothing.
func (s *scanner) chunk(line []byte) (refusal string) {
	digits, _, _ := bytes.Cut(line, []byte{';'})
	if len(digits) == 0 || len(digits) > 15 {
		return "a chunk size that is none"
	}
	s.left = 0
	for _, c := range digits {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			c = c | 0x20 - 'a' + 10
		default:
			return "a chunk size that is none"
		}
		s.left = s.left<<4 | uint64(c)
	}
	s.state = chunkData
	if s.left == 0 {
		s.state = trailerLine
	}
	return ""
}

// field splits a line of a head or a trailer.
func field(line []byte) (name, value []byte, refusal string) {
	colon := bytes.IndexByte(line, ':')
	if colon <= 0 {
		return nil, nil, "a header line without a name"
	}
	name = line[:colon]
	for _, c := range name { // a folded line begins with a space, others have one before the colon
		if !token[c] {
			return nil, nil, "a header name that is none"
		}
	}
	return name, bytes.Trim(line[colon+1:], " "), ""
}

// token has the characters of a field's name.
var token = func() (t [256]bool) {
	for _, c := range "!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" {
		t[c] = true
	}
	return t
}()

// is compares a field's name with one in lower case.
func is(name []byte, lower string) bool {
	if len(name) != len(lower) {
		return false
	}
	for i, c := range name {
		if 'A' <= c && c <= 'Z' {
			c |= 0x20
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

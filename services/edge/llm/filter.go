package llm

import (
	"bytes"
	"io"
)

// maxHeld bounds what a filter holds back of an event that has not come whole, in bytes; a longer
// one passes as it is.
const maxHeld = 64 << 10

// filter removes from a stream what only the edge asked for.
type filter struct {
	io.ReadCloser
	held    []byte // the beginning of an event
	looked  int    // how much of it has been looked at for an end
	ready   []byte // what can be read
	passing bool   // the rest of an event that was too long to be held
	cr      bool   // an event that was left out ended in CR, whose LF may come
	err     error  // of the stream, once ready is empty

	scan  *scanner
	found finding
}

// finding is what one event of a stream holds.
type finding struct {
	usage, choices bool // an object; at least one
	// from and to are where the member "usage" stands in the payload; both 0: nowhere.
	from, to int
}

// StripUsage gives a stream of server-sent events without the usage in it: the event that brings
// nothing else is left out, and the member is cut from others. What comes in whole events
// leaves at once.
func StripUsage(stream io.ReadCloser) io.ReadCloser {
	f := &filter{ReadCloser: stream}
	f.scan = newScanner(f.visit)
	return f
}

func (f *filter) Read(p []byte) (int, error) {
	for len(f.ready) == 0 {
		if f.err != nil {
			return 0, f.err
		}
		n, err := f.ReadCloser.Read(p)
		if n > 0 && len(f.held) == 0 && !f.passing && !f.cr && err == nil && eventEnd(p[:n]) > 0 && whole(p[:n]) && !bytes.Contains(p[:n], []byte(`"usage"`)) {
			return n, nil // nearly always
		}
		f.take(p[:n])
		if err != nil {
			f.err = err
			f.ready = append(f.ready, f.held...) // an event without its end
			f.held = nil
		}
		if n == 0 && err == nil {
			return 0, nil
		}
	}
	n := copy(p, f.ready)
	f.ready = f.ready[n:]
	if len(f.ready) == 0 {
		f.ready = nil
	}
	return n, nil
}

// take cuts what has come into events.
func (f *filter) take(p []byte) {
	if f.cr && len(p) > 0 {
		f.cr = false
		p = bytes.TrimPrefix(p, []byte("\n"))
	}
	f.held = append(f.held, p...)
	cut := false
	for {
		// An end has four bytes at the most, and may have been cut in any place.
		from := max(0, f.looked-3)
		n := eventEnd(f.held[from:])
		if n == 0 {
			f.looked = len(f.held)
			break
		}
		n += from
		f.looked, cut = 0, true
		if f.passing {
			f.ready = append(f.ready, f.held[:n]...)
			f.passing = false
		} else {
			f.ready = f.strip(f.ready, f.held[:n])
		}
		f.held = f.held[n:]
	}
	switch {
	case len(f.held) == 0:
		f.held = nil
	case f.passing || len(f.held) > maxHeld:
		// The last bytes may be the half of its end.
		n := max(0, len(f.held)-3)
		f.ready = append(f.ready, f.held[:n]...)
		f.held = bytes.Clone(f.held[n:])
		f.looked, f.passing = len(f.held), true
	case cut:
		f.held = bytes.Clone(f.held) // lets go of what has passed
	}
}

// eventEnd is the length of the first event with its blank line; 0 where none is whole.
func eventEnd(p []byte) int {
	for i := 0; ; {
		n := bytes.IndexAny(p[i:], "\r\n")
		if n < 0 {
			return 0
		}
		i += n + 1
		if p[i-1] == '\r' && i < len(p) && p[i] == '\n' {
			i++
		}
		// A blank line is a line end after a line end.
		switch {
		case i == len(p):
			return 0
		case p[i] == '\n':
			return i + 1
		case p[i] == '\r':
			if i+1 < len(p) && p[i+1] == '\n' {
				return i + 2
			}
			return i + 1
		}
	}
}

// whole says that p ends with an event.
func whole(p []byte) bool {
	return bytes.HasSuffix(p, []byte("\n\n")) || bytes.HasSuffix(p, []byte("\r\n\r\n"))
}

// strip appends one event to out, without its usage.
func (f *filter) strip(out, event []byte) []byte {
	from := payload(event)
	if from < 0 || !bytes.Contains(event, []byte(`"usage"`)) {
		return append(out, event...)
	}
	f.found = finding{}
	f.scan.reset()
	f.scan.Write(event[from:])
	switch found := f.found; {
	case f.scan.bad || !f.scan.over || found.to == 0:
		return append(out, event...)
	case found.usage && !found.choices:
		f.cr = event[len(event)-1] == '\r'
		if event[0] == '\n' {
			out = append(out, '\n') // of the event before
		}
		return out
	default:
		start, end := member(event, from+found.from, from+found.to)
		out = append(out, event[:start]...)
		return append(out, event[end:]...)
	}
}

// payload is where the data of an event of one data line begins; negative where there are none or several.
func payload(event []byte) int {
	at := -1
	for i := 0; i < len(event); {
		line := event[i:]
		if n := bytes.IndexAny(line, "\r\n"); n >= 0 {
			line = line[:n]
		}
		if bytes.HasPrefix(line, []byte("data:")) {
			if at >= 0 {
				return -1
			}
			at = i + len("data:")
		}
		i += len(line) + 1
	}
	return at
}

// member widens the place of an object's member by the comma that goes with it.
func member(doc []byte, from, to int) (start, end int) {
	for start = from; start > 0 && bytes.IndexByte([]byte(" \t\r\n"), doc[start-1]) >= 0; {
		start--
	}
	if start > 0 && doc[start-1] == ',' {
		return start - 1, to
	}
	for end = to; end < len(doc) && bytes.IndexByte([]byte(" \t\r\n"), doc[end]) >= 0; {
		end++
	}
	if end < len(doc) && doc[end] == ',' {
		return from, end + 1
	}
	return from, to
}

func (f *filter) visit(e event) {
	s := f.scan
	switch {
	case s.depth() == 1 && string(s.key(1)) == "usage" && e != opened:
		f.found.usage = e == closed
		f.found.from, f.found.to = s.keyStart[0], s.at
	case s.depth() == 2 && string(s.key(1)) == "choices":
		f.found.choices = true
	}
}

package framing

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// stream is one entry of testdata/smuggling.txt.
type stream struct {
	name, sent string
	refused    bool
}

func corpus(t testing.TB) (streams []stream) {
	t.Helper()
	text, err := os.ReadFile("testdata/smuggling.txt")
	if err != nil {
		t.Fatal(err)
	}
	for n, line := range strings.Split(string(text), "\n") {
		switch part := strings.Split(line, "|"); {
		case line == "" || line[0] == '#':
		case line[0] == '"':
			sent, err := strconv.Unquote(line)
			if err != nil {
				t.Fatalf("line %d: %v", n+1, err)
			}
			streams[len(streams)-1].sent += sent
		case len(part) == 3:
			streams = append(streams, stream{name: strings.TrimSpace(part[0]), refused: strings.TrimSpace(part[2]) == "400"})
		default:
			t.Fatalf("line %d: %q", n+1, line)
		}
	}
	return streams
}

// pass runs a scanner over what comes in packets of this size, as a conn does. It gives what
// may pass, the refusal, and the offsets between requests.
func pass(s *scanner, sent string, size int) (passed int, refusal string, between []int) {
	for passed < len(sent) {
		packet := sent[passed:min(passed+size, len(sent))]
		n, refusal := s.scan([]byte(packet))
		passed += n
		if refusal != "" {
			return passed, refusal, between
		}
		if s.state == requestLine && len(s.line) == 0 {
			between = append(between, passed)
		}
	}
	return passed, "", between
}

// Whatever the packets, the same streams are refused, and no head, chunk line or trailer that is
// refused has passed to its end.
func TestStreamsInPackets(t *testing.T) {
	t.Parallel()
	streams := corpus(t)
	if len(streams) < 28 {
		t.Fatalf("only %d streams", len(streams))
	}
	for _, c := range streams {
		var why string
		for _, size := range []int{1, 2, 7, 64, 1 << 20} {
			passed, refusal, _ := pass(new(scanner), c.sent, size)
			if (refusal != "") != c.refused || !c.refused && passed != len(c.sent) {
				t.Errorf("%s, in packets of %d: refused for %q after %d bytes", c.name, size, refusal, passed)
			}
			if why == "" {
				why = refusal
			}
			if refusal != why {
				t.Errorf("%s: refused for %q and for %q", c.name, refusal, why)
			}
			if rest := c.sent[passed:]; c.refused && !strings.Contains(rest, "\n") && size > 1 {
				t.Errorf("%s, in packets of %d: all but %q has passed", c.name, size, rest)
			}
		}
	}
}

// A line that never ends is not kept for ever.
func TestEndlessLine(t *testing.T) {
	t.Parallel()
	s := new(scanner)
	passed, refusal, _ := pass(s, "GET /"+strings.Repeat("a", 1<<20), 1000)
	if refusal == "" || passed > maxLine || cap(s.line) > 2*maxLine {
		t.Errorf("%d bytes passed, %d are kept: %q", passed, cap(s.line), refusal)
	}
}

// The preface of HTTP/2 passes where it is allowed, and with it everything after.
func TestPreface(t *testing.T) {
	t.Parallel()
	const sent = prefaceLine + "\r\n" + prefaceRest + "\x00\n\x01\r"
	for _, size := range []int{1, 5, 100} {
		if passed, refusal, _ := pass(&scanner{h2: true}, sent, size); refusal != "" || passed != len(sent) {
			t.Errorf("in packets of %d: %q after %d", size, refusal, passed)
		}
		if _, refusal, _ := pass(&scanner{h2: true}, prefaceLine+"\r\nHost: x\r\n\r\n", size); refusal == "" {
			t.Errorf("in packets of %d: half a preface passes", size)
		}
		if _, refusal, _ := pass(new(scanner), sent, size); refusal == "" {
			t.Errorf("in packets of %d: HTTP/2 passes unasked", size)
		}
	}
}

package framing

import (
	"bufio"
	"io"
	"net/http"
	"strings"
	"testing"
)

// What passes, net/http takes for the same requests: each of them ends where the scanner says, whatever
// the packets, and what was refused is part of none.
func FuzzFraming(f *testing.F) {
	for _, c := range corpus(f) {
		f.Add(c.sent, uint8(len(c.name)))
	}
	f.Fuzz(func(t *testing.T, sent string, size uint8) {
		passed, refusal, between := pass(new(scanner), sent, 1)
		ends := map[int]bool{0: true}
		for _, end := range between {
			ends[end] = true
		}
		s := new(scanner)
		if n, why, _ := pass(s, sent, int(size)+1); why != refusal || n > passed {
			t.Fatalf("in packets of %d: %q after %d, byte by byte %q after %d", int(size)+1, why, n, refusal, passed)
		} else {
			passed = n
		}
		stream := sent[:passed]
		if refusal != "" {
			if s.state >= body {
				stream += string(noBody)
			} else {
				stream += string(noHead)
			}
		}
		raw := strings.NewReader(stream)
		in := bufio.NewReader(raw)
		post := false
		for {
			if peek, _ := in.Peek(4); post { // as the server does
				for len(peek) > 0 && (peek[0] == '\r' || peek[0] == '\n') {
					in.Discard(1)
					peek = peek[1:]
				}
			}
			begin := len(stream) - raw.Len() - in.Buffered()
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			_, err = io.Copy(io.Discard, req.Body)
			end := len(stream) - raw.Len() - in.Buffered()
			if err != nil {
				return
			}
			if end > passed {
				t.Fatalf("%q passed, and the refusal of it (%s) is part of request %q", sent[:passed], refusal, req.RequestURI)
			}
			if !ends[end] {
				t.Fatalf("the request at %d of %q ends at %d for net/http, and not for us: %v", begin, stream, end, between)
			}
			post = req.Method == http.MethodPost
		}
	})
}

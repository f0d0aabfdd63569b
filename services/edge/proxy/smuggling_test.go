package proxy_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// What can be framed in two ways is refused, and its connection closed. What reaches the upstream
// whole is what was meant to, whatever the packets that it comes in.
func TestSmuggling(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../pkg/framing/testdata/smuggling.txt")
	if err != nil {
		t.Fatal(err)
	}
	type stream struct {
		name, sent string
		want       []string
		last       int
	}
	var streams []stream
	for _, line := range strings.Split(string(text), "\n") {
		switch part := strings.Split(line, "|"); {
		case line == "" || line[0] == '#':
		case line[0] == '"':
			sent, err := strconv.Unquote(line)
			if err != nil {
				t.Fatal(err)
			}
			streams[len(streams)-1].sent += sent
		default:
			last, err := strconv.Atoi(strings.TrimSpace(part[2]))
			if err != nil {
				t.Fatal(err)
			}
			streams = append(streams, stream{name: strings.TrimSpace(part[0]), want: strings.Fields(part[1]), last: last})
		}
	}
	var mu sync.Mutex
	var seen []string
	url := upstream(t, func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			seen = append(seen, fmt.Sprintf("%s:%d", r.Method, len(body)))
		}
	})
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 100000", "refill_rate: 1")})
	r.engine.Sink = nowhere{}
	for _, s := range streams {
		for _, size := range []int{1, 11, 1 << 16} {
			conn := r.raw("")
			for rest := s.sent; rest != ""; {
				packet := rest[:min(size, len(rest))]
				if _, err := io.WriteString(conn, packet); err != nil {
					break // refused already
				}
				rest = rest[len(packet):]
			}
			last := 0
			for in := bufio.NewReader(conn); ; {
				res, err := http.ReadResponse(in, nil)
				if errors.Is(err, os.ErrDeadlineExceeded) {
					t.Fatalf("%s, in packets of %d: the connection stays open after %d", s.name, size, last)
				}
				if err != nil {
					break
				}
				io.Copy(io.Discard, res.Body)
				last = res.StatusCode
			}
			conn.Close()
			mu.Lock()
			if last != s.last || !slices.Equal(seen, s.want) {
				t.Errorf("%s, in packets of %d: last answer %d, want %d; the upstream saw %v, want %v", s.name, size, last, s.last, seen, s.want)
			}
			seen = nil
			mu.Unlock()
		}
	}
}

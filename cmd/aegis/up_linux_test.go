package main_test

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// `make soak` sends ten gigabytes.
var huge = flag.Int("huge", 128, "the length of the huge body, in MiB")

// memory gives a line of the process's status, in bytes.
func (r *running) memory(t *testing.T, field string) int64 {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", r.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var kilobytes int64
		if n, _ := fmt.Sscanf(lines.Text(), field+": %d kB", &kilobytes); n == 1 {
			return kilobytes << 10
		}
	}
	t.Fatalf("no %s", field)
	return 0
}

// A huge body streams through the real process, up and down at once, and makes it no more than 32 MiB larger.
// One above the route's cap gets 413.
func TestUpStreamsHugeBody(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		io.Copy(w, r.Body)
	}))
	t.Cleanup(s.Close)
	size := int64(*huge) << 20
	doc := fmt.Sprintf("upstreams: {up: {url: '%s'}}\nroutes:\n  api: {path: /api, upstream: up, max_body_bytes: %d}\n  capped: {path: /capped, upstream: up, max_body_bytes: 1000000}\n", s.URL, size)
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(doc), 0o600); err != nil {
		t.Fatal(err)
	}
	r := up(t, "--policy", file)
	edge := regexp.MustCompile(`edge +(http://[0-9.:]+)`).FindStringSubmatch(r.output())[1]
	// stream sends n bytes, chunked, and gives the status and the length of the answer.
	stream := func(path string, n int64) (status int, length int64) {
		t.Helper()
		res, err := http.Post(edge+path, "application/octet-stream", io.LimitReader(zeros{}, n))
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if length, err = io.Copy(io.Discard, res.Body); err != nil {
			t.Error(err)
		}
		return res.StatusCode, length
	}
	if status, n := stream("/api/warm", 1<<20); status != http.StatusOK || n != 1<<20 {
		t.Fatalf("%d with %d bytes", status, n)
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", r.cmd.Process.Pid), []byte("5"), 0o200); err != nil { // the peak begins anew
		t.Fatal(err)
	}
	before := r.memory(t, "VmRSS")
	if status, n := stream("/api/huge", size); status != http.StatusOK || n != size {
		t.Errorf("%d with %d bytes, want all %d", status, n, size)
	}
	grown := r.memory(t, "VmHWM") - before
	t.Logf("%d MiB through the edge and back made it %.1f MiB larger", size>>20, float64(grown)/(1<<20))
	if grown > 32<<20 {
		t.Errorf("%d MiB through the edge and back made it %d MiB larger", size>>20, grown>>20)
	}
	req, err := http.NewRequest(http.MethodPost, edge+"/capped", strings.NewReader(strings.Repeat("x", 1_000_001)))
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("a declared length above the cap: %s", res.Status)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

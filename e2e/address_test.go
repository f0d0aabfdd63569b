package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/aegisrate/aegisrate/e2e/stack"
)

// Clients without a key are told apart by their addresses through the front, and by nothing they say.
func TestAddressesThroughTheFront(t *testing.T) {
	change(t, map[string]quota{"fast": {Capacity: 5, RefillRate: 0.01}})
	boxes := make([]*stack.Box, 2)
	for i := range boxes {
		box, err := running.NewBox(t.Context(), "public")
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := box.Close(); err != nil {
				t.Error(err)
			}
		}()
		boxes[i] = box
	}
	// statuses sends some requests and gives the status of each. Header lines are added as they are.
	statuses := func(box *stack.Box, n int, headers ...string) []string {
		t.Helper()
		var list strings.Builder
		for _, h := range headers {
			fmt.Fprintf(&list, " --header '%s'", h)
		}
		out, err := box.Sh(t.Context(), fmt.Sprintf(
			`for i in $(seq %d); do wget -S -q -O /dev/null%s http://front:8080/api/fast 2>&1 | sed -n 's|^ *HTTP/1.1 \([0-9]*\).*|\1|p'; done`,
			n, strings.ReplaceAll(list.String(), "$i", "'$i'")))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Fields(out)
	}
	count := func(list []string, status string) (n int) {
		for _, s := range list {
			if s == status {
				n++
			}
		}
		return n
	}

	first := statuses(boxes[0], 12)
	if len(first) != 12 || count(first, "200") != 5 || first[11] != "429" {
		t.Fatalf("the first client has 5 requests: %v", first)
	}
	for _, spoof := range []string{"X-Forwarded-For: 203.0.113.$i", "Forwarded: for=203.0.113.$i", "X-Real-IP: 203.0.113.$i", "X-API-Key: unknown-$i"} {
		if got := statuses(boxes[0], 3, spoof); count(got, "429") != 3 {
			t.Errorf("with %q the first client got %v", spoof, got)
		}
	}
	if got := statuses(boxes[1], 5); count(got, "200") != 5 {
		t.Errorf("the second client pays for the first: %v", got)
	}
}

// The front lets through what an edge has to judge.
func TestOversizedHeadersAreTheEdgesToRefuse(t *testing.T) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, running.Front+"/api/fast", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Large", strings.Repeat("x", 40<<10))
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("got %s, want 431", resp.Status)
	}
}

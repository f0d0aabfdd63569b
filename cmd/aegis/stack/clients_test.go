package stack

import (
	"bufio"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

// gauge reads a metric of an edge that there is once.
func gauge(t *testing.T, edge *Node, name string) float64 {
	t.Helper()
	resp, err := http.Get("http://" + edge.AdminAddr() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if text, found := strings.CutPrefix(lines.Text(), name+"{"); found {
			v, err := strconv.ParseFloat(text[strings.LastIndexByte(text, ' ')+1:], 64)
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
	}
	t.Fatalf("%s has no %s", edge.AdminAddr(), name)
	return 0
}

// TestClientOperationsReachEveryEdge: what is done to a client ends the leases and the remembered denials of both
// edges at once.
func TestClientOperationsReachEveryEdge(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t, func(p *policy.Policy) {
		p.LeaseSeconds = 60
		fast, slow := p.Routes["fast"], p.Routes["slow"]
		fast.LeaseSize, fast.RefillRate = new(int64), still
		slow.Capacity = 1_000_000 // a lease lives for as long as it may
		p.Routes["fast"], p.Routes["slow"] = fast, slow
	}))
	edges := []*Node{s.Edges()[0], addEdge(t, s, "edge-2")}
	api(t, s, http.MethodPost, "/api/users", `{"name":"ann"}`)
	key := api(t, s, http.MethodPost, "/api/users/ann/keys", `{}`)["key"].(string)
	ask := func(e *Node) int { return get(t, e, "/api/fast", key).status }
	// each awaits something of each edge alone.
	each := func(what string, holds func(*Node) bool) {
		t.Helper()
		for _, e := range edges {
			await(t, 20*time.Second, what, func() bool { return holds(e) })
		}
	}
	answers := func(want int) func(*Node) bool { return func(e *Node) bool { return ask(e) == want } }
	leased := func(e *Node) bool { return gauge(t, e, "aegis_edge_leases") > 0 }
	operate := func(operation, body string) {
		t.Helper()
		api(t, s, http.MethodPost, "/api/clients/user:ann/"+operation, body)
	}
	// warm leaves a lease at both edges.
	warm := func() {
		t.Helper()
		await(t, 20*time.Second, "leases", func() bool {
			for _, e := range edges {
				get(t, e, "/api/slow?ms=0", key)
			}
			return leased(edges[0]) && leased(edges[1])
		})
	}
	// exhaust leaves a denial that both edges remember: they refuse without asking.
	exhaust := func() {
		t.Helper()
		await(t, 20*time.Second, "denials", func() bool {
			return !slices.ContainsFunc(edges, func(e *Node) bool {
				before := gauge(t, e, "aegis_edge_remembered_denials_total")
				for range 3 {
					if ask(e) != http.StatusTooManyRequests {
						return true
					}
				}
				return gauge(t, e, "aegis_edge_remembered_denials_total") != before+3
			})
		})
	}

	each("the key", answers(http.StatusOK))
	for _, op := range [][2]string{
		{"reset", `{}`}, {"grant", `{"tokens":1}`}, {"raise", `{"route":"slow","capacity":2000000,"refill_rate":10,"seconds":3600}`},
	} {
		// No lease ends by itself within its first second; a round that a busy machine drew out shows nothing.
		shown := false
		for round := 0; round < 10 && !shown; round++ {
			begun := time.Now()
			warm()
			operate(op[0], op[1])
			each("the end of a lease", func(e *Node) bool { return !leased(e) })
			shown = time.Since(begun) < time.Second
		}
		if !shown {
			t.Errorf("%s ends no lease at once", op[0])
		}
	}
	warm()
	operate("block", `{}`)
	each("the block", answers(http.StatusForbidden))
	operate("unblock", `{}`)
	each("the end of the block", answers(http.StatusOK))

	exhaust()
	operate("reset", `{}`)
	each("the end of a denial by a reset", answers(http.StatusOK))
	exhaust()
	operate("grant", `{"tokens":100}`)
	each("the end of a denial by a grant", answers(http.StatusOK))
	exhaust()
	operate("raise", `{"route":"fast","capacity":1000,"refill_rate":100,"seconds":3600}`)
	each("the end of a denial by a raised limit", func(e *Node) bool {
		a := get(t, e, "/api/fast", key)
		return a.status == http.StatusOK && a.header.Get("RateLimit-Limit") == "1000"
	})
}

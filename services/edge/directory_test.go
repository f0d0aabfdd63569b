package edge_test

import (
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/pkg/rules"
	"github.com/aegisrate/aegisrate/services/edge"
)

// rulebook writes the rules bucket as the controlplane does.
type rulebook struct {
	t testing.TB
	b *bus.Bus
}

func (r rulebook) put(key string, data []byte, err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
	var opts []bus.PublishOption
	if data == nil {
		opts = append(opts, bus.WithDelete())
	}
	if _, err := r.b.Publish(r.t.Context(), events.SubjectRules(key), data, opts...); err != nil {
		r.t.Fatal(err)
	}
}

func (r rulebook) user(u rules.User) {
	r.t.Helper()
	for _, k := range u.Keys {
		data, err := rules.EncodeOwner(u.Name)
		r.put(rules.HashKey(k.Hash), data, err)
	}
	data, err := rules.EncodeUser(u)
	r.put(rules.UserKey(u.Name), data, err)
}

func limitOf(res *http.Response) string { return res.Header.Get("RateLimit-Limit") }

// TestClientsOfTheRules: a client is looked up when it is first seen, and changes reach the edge by themselves.
func TestClientsOfTheRules(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	b := server.Bus(t)
	if err := b.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
	version := publish(t, b, policyFor(t, backend(t), 50))
	book := rulebook{t, b}
	plan := func(burst int64) {
		data, err := rules.EncodePlan(rules.Plan{Name: "gold", Plan: policy.Plan{Rate: 1, Burst: burst}})
		book.put(rules.PlanKey("gold"), data, err)
	}
	plan(7)
	ann := rules.User{Name: "ann", Plan: "gold", Keys: []rules.Key{{Hash: rules.HashOf("ann's key")}}}
	book.user(ann)

	dir := filepath.Join(t.TempDir(), "edge")
	withDir := func(c *edge.Config) { c.DataDir = dir }
	r := start(t, edge.Deps{Bus: server.Bus(t), Store: memstore.New(nil)}, withDir)
	r.awaitVersion(version)
	ask := func(r *rig, key string) *http.Response { return r.get("/api", "X-API-Key", key) }
	await := func(what, key string, holds func(*http.Response) bool) {
		t.Helper()
		bustest.Await(t, what, func() bool { return holds(ask(r, key)) })
	}
	limit := func(want string) func(*http.Response) bool {
		return func(res *http.Response) bool { return limitOf(res) == want }
	}
	status := func(want int) func(*http.Response) bool {
		return func(res *http.Response) bool { return res.StatusCode == want }
	}
	await("the plan of the rules", "ann's key", limit("7"))
	if got := limitOf(ask(r, "nobody's key")); got != "50" {
		t.Errorf("a key that nobody has: limit %s, want the route's for the address", got)
	}

	plan(8)
	await("another plan", "ann's key", limit("8"))
	ann.SetOverride(policy.Override{Route: "api", Quota: policy.Quota{Capacity: 3, RefillRate: 0.001}})
	book.user(ann)
	await("an override", "ann's key", limit("3"))
	ann.Block = &rules.Block{}
	book.user(ann)
	await("a block", "ann's key", status(http.StatusForbidden))
	ann.Block = nil
	ann.AddKey(rules.Key{Hash: rules.HashOf("nobody's key")}) // which the edge has seen, as nobody's
	book.user(ann)
	await("a key that was unknown", "nobody's key", limit("3"))
	ann.DropKey(rules.Key{Hash: rules.HashOf("nobody's key")}.ID())
	book.user(ann)
	await("a key that was withdrawn", "nobody's key", limit("50"))

	// An address is blocked for itself, and not for those who have a key.
	address := rules.User{Name: "ip:127.0.0.1", Block: &rules.Block{Reason: "scraping"}}
	data, err := rules.EncodeUser(address)
	book.put(rules.UserKey(address.Name), data, err)
	await("a blocked address", "", status(http.StatusForbidden))
	if res := ask(r, "ann's key"); res.StatusCode == http.StatusForbidden {
		t.Error("a user is blocked for its address")
	}

	// Without NATS all of it is still known, also after a restart.
	r.stop()
	server.Stop()
	r = start(t, edge.Deps{Bus: server.Bus(t), Store: memstore.New(nil)}, withDir)
	if res := ask(r, "ann's key"); limitOf(res) != "3" {
		t.Errorf("after a restart without NATS: limit %s", limitOf(res))
	}
	if res := ask(r, ""); res.StatusCode != http.StatusForbidden {
		t.Errorf("after a restart without NATS the blocked address gets %d", res.StatusCode)
	}
	// A key never seen counts as its address then, at once.
	if res := ask(r, "new key"); res.StatusCode != http.StatusForbidden {
		t.Errorf("a new key without NATS: %d", res.StatusCode)
	}

	// What changed meanwhile is heard when NATS is back.
	server.Restart()
	bustest.Await(t, "NATS", b.Connected)
	book.put(rules.UserKey(address.Name), nil, nil)
	await("the address is free", "", status(http.StatusOK))
	book.put(rules.UserKey("ann"), nil, nil)
	await("the user is gone", "ann's key", limit("50"))
}

// TestRulesNATSHangs: a server that never answers holds a request with an unknown key for the
// look-up's bound, and the next ones not at all.
func TestRulesNATSHangs(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t, bustest.Listen())
	direct := server.Bus(t)
	if err := direct.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
	version := publish(t, direct, policyFor(t, backend(t), 50))
	proxy := bustest.NewProxy(t, server.URL())
	b := server.Bus(t, func(c *bus.Config) { c.InProcess, c.URL = nil, "nats://"+proxy.Addr() })
	bustest.Await(t, "the connection", b.Connected)
	r := start(t, edge.Deps{Bus: b, Store: memstore.New(nil)})
	r.awaitVersion(version)
	proxy.Stall()
	begin := time.Now()
	const requests = 50
	for range requests {
		if res := r.get("/api", "X-API-Key", "a key nobody has"); res.StatusCode != http.StatusOK {
			t.Fatalf("status %d", res.StatusCode)
		}
	}
	// One look-up of 100 ms a second or so; each request waiting would take 5 s and more.
	if took := time.Since(begin); took > 4*time.Second {
		t.Errorf("%d requests took %v", requests, took)
	}
	proxy.Heal()
}

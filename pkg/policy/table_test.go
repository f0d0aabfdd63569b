package policy_test

import (
	"crypto/sha256"
	"fmt"
	gopath "path"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

func mustCompile(t testing.TB, doc string) *policy.Table {
	t.Helper()
	p, err := policy.Parse([]byte(doc))
	if err != nil {
		t.Fatalf("Parse: %v", err)
	}
	table, err := policy.Compile(p, 7)
	if err != nil {
		t.Fatalf("Compile: %v", err)
	}
	return table
}

const matching = base + `
routes:
  root: {path: /, upstream: u, methods: [GET]}
  api: {path: /api, upstream: u}
  write: {path: /api, upstream: u, methods: [POST, PUT]}
  deep: {path: /api/v1/users, upstream: u, methods: [GET]}
  host: {path: /, host: shop.example.com, upstream: u, methods: [GET, PUT]}
  hostapi: {path: /api/v1, host: Shop.example.com, upstream: u}
  six: {path: /six, host: "::1", upstream: u}
`

func TestMatch(t *testing.T) {
	t.Parallel()
	table := mustCompile(t, matching)
	for _, c := range []struct{ method, host, path, want string }{
		{"GET", "any", "/", "root"},
		{"GET", "any", "", "root"},
		{"GET", "any", "*", "root"},
		{"GET", "any", "/apix", "root"},
		{"POST", "any", "/apix", ""},
		{"GET", "any", "/api", "api"},
		{"GET", "any", "/api/", "api"},
		{"POST", "any", "/api/x", "write"},
		{"post", "any", "/api/x", "api"},
		{"GET", "any", "/api/v1/users", "deep"},
		{"GET", "any", "/api/v1/users/1/2/3/4/5", "deep"},
		{"GET", "any", "/api/v1/usersx", "api"},
		{"PUT", "any", "/api/v1/users", "write"},
		{"GET", "any", "//api//v1/./users/../users", "deep"},
		{"GET", "any", "/api/../../..", "root"},
		{"GET", "any", "/API", "root"},
		{"GET", "shop.example.com", "/", "host"},
		{"GET", "SHOP.example.COM:8080", "/else", "host"},
		{"GET", "shop.example.com.", "/else", "host"},
		{"DELETE", "shop.example.com", "/api/v1/x", "hostapi"},
		{"GET", "shop.example.com", "/api", "host"}, // the host goes before the longer path
		{"DELETE", "shop.example.com", "/api", "api"},
		{"DELETE", "shop.example.com", "/", ""},
		{"GET", "[::1]:8080", "/six/x", "six"},
		{"GET", "::1", "/six", "six"},
		{"GET", "evil.shop.example.com", "/api/v1/x", "api"},
		{"GET", "", "/api", "api"},
		{"GET", "any", "/" + strings.Repeat("a/", 100), "root"},
	} {
		got := ""
		if r := table.Match(c.method, c.host, c.path); r != nil {
			got = r.Name
		}
		if got != c.want {
			t.Errorf("%s %s %.60s: route %q, want %q", c.method, c.host, c.path, got, c.want)
		}
	}
	if r := mustCompile(t, base).Match("GET", "h", "/"); r != nil {
		t.Errorf("a policy without routes matched %v", r)
	}
	if r := mustCompile(t, base+"routes: {r: {path: /a/b, upstream: u}}").Match("GET", "h", "/a"); r != nil {
		t.Errorf("a path above the route's matched %v", r)
	}
}

// A path of very many segments must cost no more than a shallow one.
func TestMatchIsBoundedByTheRoutes(t *testing.T) {
	t.Parallel()
	routes := matching
	for i := range 100 { // small maps compare lengths only; large ones hash the whole path
		routes += fmt.Sprintf("  r%d: {path: /r%d, upstream: u}\n", i, i)
	}
	table := mustCompile(t, routes)
	path := "/api" + strings.Repeat("/a", 16_000)
	// Cleaning a path is linear in its length, so it is the measure: without the
	// bound a match takes about a thousand times as long. The best of several tries
	// counts, as others use this machine too.
	best := func(f func()) time.Duration {
		least := time.Hour
		for range 10 {
			begin := time.Now()
			f()
			least = min(least, time.Since(begin))
		}
		return least
	}
	clean := best(func() { _ = gopath.Clean(path + "/") })
	match := best(func() {
		if r := table.Match("GET", "any", path); r == nil || r.Name != "api" {
			t.Fatalf("got %v", r)
		}
	})
	if match > 50*clean {
		t.Errorf("a match took %v, cleaning the path %v", match, clean)
	}
}

func TestLimits(t *testing.T) {
	t.Parallel()
	hash := func(key string) string {
		return mustHex(sha256.Sum256([]byte(key)))
	}
	table := mustCompile(t, base+`
anonymous_plan: free
routes:
  own:
    {path: /own, upstream: u, capacity: 20, refill_rate: 0.0000015, max_debt: 5,
     plans: {growth: {capacity: 200, refill_rate: 100}},
     users: {gus: {capacity: 9, refill_rate: 3}}}
  bare: {path: /bare, upstream: u, users: {gus: {capacity: 9, refill_rate: 3}}}
  slide: {path: /slide, upstream: u, algorithm: sliding_window, sliding_limit: 30, window_seconds: 6, capacity: 1, refill_rate: 1}
users:
  ann: {plan: starter, key_hashes: [`+hash("ann")+`, `+hash("ann2")+`]}
  gus: {plan: growth, key_hashes: [`+hash("gus")+`]}
  gil: {plan: growth, key_hashes: []}
  eve: {plan: enterprise, key_hashes: []}
  non: {key_hashes: []}
  adm: {admin: true, key_hashes: [`+hash("adm")+`]}
`)
	own := policy.ScopedLimit{Scope: "own", Adaptive: true,
		Limit: bucket.Limit{Kind: bucket.TokenBucket, Capacity: 20, Rate: 2, Grace: true, MaxDebt: 5_000_000}}
	plan := func(c int64, rate int64, grace bool) policy.ScopedLimit {
		return policy.ScopedLimit{Scope: bucket.ScopePlan,
			Limit: bucket.Limit{Kind: bucket.TokenBucket, Capacity: c, Rate: rate * bucket.One, Grace: grace}}
	}
	day := func(c int64) policy.ScopedLimit {
		return policy.ScopedLimit{Scope: bucket.ScopeDay, Limit: bucket.Limit{Kind: bucket.DailyQuota, Capacity: c}}
	}
	token := func(scope string, c, rate int64) policy.ScopedLimit {
		return policy.ScopedLimit{Scope: scope, Adaptive: true,
			Limit: bucket.Limit{Kind: bucket.TokenBucket, Capacity: c, Rate: rate * bucket.One, Grace: true}}
	}
	slide := policy.ScopedLimit{Scope: "slide", Adaptive: true,
		Limit: bucket.Limit{Kind: bucket.SlidingWindow, Capacity: 30, Window: 6, Grace: true}}
	for _, c := range []struct {
		route, user, plan string
		known             bool
		want              []policy.ScopedLimit
	}{
		{"own", "", "", false, []policy.ScopedLimit{own, plan(20, 10, false), day(10_000)}},
		{"bare", "", "", false, []policy.ScopedLimit{plan(20, 10, true), day(10_000)}},
		{"own", "ann", "starter", true, []policy.ScopedLimit{own, plan(100, 50, false), day(100_000)}},
		{"own", "gil", "growth", true, []policy.ScopedLimit{token("own", 200, 100), plan(500, 200, false), day(1_000_000)}},
		{"own", "gus", "growth", true, []policy.ScopedLimit{token("own", 9, 3), plan(500, 200, false), day(1_000_000)}},
		{"bare", "gus", "growth", true, []policy.ScopedLimit{token("bare", 9, 3), plan(500, 200, false), day(1_000_000)}},
		{"bare", "eve", "enterprise", true, []policy.ScopedLimit{plan(2000, 1000, true)}},
		{"slide", "eve", "enterprise", true, []policy.ScopedLimit{slide, plan(2000, 1000, false)}},
		{"own", "non", "", true, []policy.ScopedLimit{own}},
		{"bare", "non", "", true, nil},
	} {
		got := table.Limits(table.Route(c.route), policy.UserRules{Name: c.user, Plan: c.plan}, c.known)
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s on %s (-want +got)\n%s", c.user, c.route, diff)
		}
	}

	for key, want := range map[string]policy.UserRules{
		"ann": {Name: "ann", Plan: "starter"}, "ann2": {Name: "ann", Plan: "starter"}, "adm": {Name: "adm", Admin: true},
	} {
		if got, ok := table.User(sha256.Sum256([]byte(key))); !ok || got != want {
			t.Errorf("key %s is of %+v (%v), want %+v", key, got, ok, want)
		}
	}
	if got, ok := table.User(sha256.Sum256([]byte("stranger"))); ok {
		t.Errorf("an unknown key is of %+v", got)
	}
}

// The user's own rpm and tpm go before the plan's, each by itself; whoever is unknown has the anonymous plan's.
func TestLLMQuota(t *testing.T) {
	t.Parallel()
	table := mustCompile(t, `
anonymous_plan: small
plans: {small: {rpm: 1, tpm: 10}, big: {rpm: 5, tpm: 50}}
users:
  a: {plan: big, key_hashes: []}
  b: {plan: big, tpm: 70, key_hashes: []}
`)
	for _, c := range []struct {
		user     policy.UserRules
		known    bool
		rpm, tpm int64
	}{
		{policy.UserRules{Plan: "big"}, true, 5, 50},
		{policy.UserRules{Plan: "big", TPM: 70}, true, 5, 70},
		{policy.UserRules{RPM: 2}, true, 2, 0},
		{policy.UserRules{}, false, 1, 10},
		{policy.UserRules{Overrides: &[]policy.Override{{Plan: policy.Plan{TPM: 99}}}}, false, 1, 99},
		{policy.UserRules{Plan: "big", Overrides: &[]policy.Override{{Plan: policy.Plan{Rate: 1, Burst: 1}}}}, true, 5, 50},
	} {
		if rpm, tpm := table.LLMQuota(c.user, c.known); rpm != c.rpm || tpm != c.tpm {
			t.Errorf("%+v, known %v: %d a minute, %d tokens; want %d, %d", c.user, c.known, rpm, tpm, c.rpm, c.tpm)
		}
	}
	profile := policy.Profile{RequestsPerSecond: 3, Models: []policy.ModelRate{{Model: "m", RequestsPerSecond: 1}}}
	if profile.Rate("m") != 1 || profile.Rate("n") != 3 || (policy.Profile{}).Rate("m") != 0 {
		t.Error("a model's rate is its own, else the profile's, else none")
	}
}

// Nothing is yellow on an LLM route, whichever limit would have grace.
func TestLLMRoutesHaveNoGrace(t *testing.T) {
	t.Parallel()
	table := mustCompile(t, base+`
routes:
  own: {path: /own, upstream: u, kind: llm, capacity: 10, refill_rate: 1}
  none: {path: /none, upstream: u, kind: llm}
  http: {path: /http, upstream: u, capacity: 10, refill_rate: 1}
users: {a: {plan: free, key_hashes: []}}
`)
	for route, want := range map[string]bool{"own": false, "none": false, "http": true} {
		grace := false
		for _, l := range table.Limits(table.Route(route), policy.UserRules{Name: "a", Plan: "free"}, true) {
			grace = grace || l.Grace
		}
		if grace != want {
			t.Errorf("%s: grace %v, want %v", route, grace, want)
		}
	}
}

func TestCompiledUnits(t *testing.T) {
	t.Parallel()
	table := mustCompile(t, `
shadow_mode: true
upstreams:
  u: {url: "https://h:1/p", timeout_seconds: 0.25, trust_compute_cost: false, health: {slow_p95_ms: 500.5, increase: 0.1}}
routes:
  r: {path: /r, upstream: u, cost: 0.1, cost_per_second: 2.5, max_cost: 3, shadow_mode: false, expose_compute_cost: true}
  s: {path: /s, deny: true}
`)
	u := table.Upstreams()["u"]
	if u.URLs[0].String() != "https://h:1/p" || u.Timeout != 250*time.Millisecond || u.TrustComputeCost {
		t.Errorf("upstream is %+v", u)
	}
	want := policy.HealthRules{SlowP95: 500_500, FastP95: 300_000, ErrorRate: 150_000, ClearRate: 50_000, Floor: 200_000,
		Decrease: 500_000, Increase: 100_000, MinSamples: 10, Window: 30, MaxAge: 60_000_000}
	if diff := cmp.Diff(want, u.Health); diff != "" {
		t.Errorf("health (-want +got)\n%s", diff)
	}
	r, s := table.Route("r"), table.Route("s")
	if r.Cost != 100_000 || r.CostPerSecond != 2_500_000 || r.MaxCost != 3_000_000 || r.Shadow || !r.ExposeComputeCost || r.Deny {
		t.Errorf("r is %+v", r)
	}
	if !s.Deny || !s.Shadow || s.Cost != bucket.One || s.MaxCost != 1_000_000*bucket.One || s.MaxBodyBytes != 64<<20 || s.Algorithm != bucket.TokenBucket {
		t.Errorf("s is %+v", s)
	}
	if table.Version() != 7 || table.Policy().Routes["s"].Path != "/s" || table.Route("gone") != nil {
		t.Error("version, policy or routes are wrong")
	}
}

func BenchmarkMatch(b *testing.B) {
	table := mustCompile(b, matching)
	b.ReportAllocs()
	for b.Loop() {
		if table.Match("GET", "shop.example.com:443", "/api/v1/users/12345/orders") == nil {
			b.Fatal("no route")
		}
	}
}

// A route that does not degrade has no grace, so nothing of it is ever yellow.
func TestDegrade(t *testing.T) {
	t.Parallel()
	table, err := policy.Compile(mustParse(t, `
upstreams: {u: {url: "http://u"}}
anonymous_plan: free
routes:
  plain: {path: /plain, upstream: u, capacity: 10, refill_rate: 1}
  posts: {path: /posts, upstream: u, degrade: cache, max_stale_seconds: 60, defer_methods: [POST], fallback: closed}
  off: {path: /off, upstream: u, degrade: off, capacity: 10, refill_rate: 1}
  off-plan: {path: /off/plan, upstream: u, degrade: off}
`), 1)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"plain": true, "posts": true, "off": false, "off-plan": false} {
		grace := false
		for _, l := range table.Limits(table.Route(name), policy.UserRules{}, false) {
			grace = grace || l.Grace
		}
		if grace != want {
			t.Errorf("%s: grace is %v", name, grace)
		}
	}
	if r := table.Route("plain"); r.Degrade != policy.DegradeDefer || r.Fallback != policy.FallbackLocal || !r.Defers("DELETE") || r.Defers("POST") || r.MaxStale != time.Hour {
		t.Errorf("plain: %+v", r)
	}
	if r := table.Route("posts"); r.Degrade != policy.DegradeCache || r.Fallback != policy.FallbackClosed || r.Defers("GET") || !r.Defers("POST") || r.MaxStale != time.Minute {
		t.Errorf("posts: %+v", r)
	}
}

// A route's lease settings go before the policy's, and 0 is a setting too.
func TestLeaseSettings(t *testing.T) {
	t.Parallel()
	const routes = `
upstreams: {u: {url: "http://u"}}
routes:
  plain: {path: /plain, upstream: u}
  off: {path: /off, upstream: u, lease_size: 0}
  own: {path: /own, upstream: u, lease_size: 3, lease_seconds: 0.5}
`
	for head, want := range map[string][6]int64{
		"":                                  {10, 5_000_000, 0, 5_000_000, 3, 500_000},
		"lease_size: 0\n":                   {0, 5_000_000, 0, 5_000_000, 3, 500_000},
		"lease_size: 7\nlease_seconds: 2\n": {7, 2_000_000, 0, 2_000_000, 3, 500_000},
	} {
		table, err := policy.Compile(mustParse(t, head+routes), 1)
		if err != nil {
			t.Fatal(err)
		}
		var got [6]int64
		for i, name := range []string{"plain", "off", "own"} {
			r := table.Route(name)
			got[2*i], got[2*i+1] = r.LeaseSize/bucket.One, r.LeaseTTL
		}
		if got != want {
			t.Errorf("%q: got %v, want %v", head, got, want)
		}
	}
}

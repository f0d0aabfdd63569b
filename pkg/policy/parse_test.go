package policy_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// base is a small valid document that tests add to.
const base = `
upstreams:
  u: {url: "http://127.0.0.1:1"}
`

func mustParse(t *testing.T, doc string) policy.Policy {
	t.Helper()
	p, err := policy.Parse([]byte(doc))
	if err != nil {
		t.Fatalf("Parse: %v\n%s", err, doc)
	}
	return p
}

func errorsOf(t *testing.T, err error) policy.Errors {
	t.Helper()
	var errs policy.Errors
	if !errors.As(err, &errs) || len(errs) == 0 {
		t.Fatalf("got error %v (%T), want policy.Errors", err, err)
	}
	return errs
}

func wantProblem(t *testing.T, err error, path, problem string) {
	t.Helper()
	for _, e := range errorsOf(t, err) {
		if e.Path == path && strings.Contains(e.Problem, problem) {
			return
		}
	}
	t.Errorf("got error %v, want %q at %q", err, problem, path)
}

func TestParseFillsInDefaults(t *testing.T) {
	t.Parallel()
	got := mustParse(t, base+`
routes:
  r: {path: /r, upstream: u, host: API.Example.com, capacity: 5, refill_rate: 0.5, cors: {allowed_origins: ["https://app.example.com"]}}
users:
  ann: {plan: free, key_hashes: [`+strings.Repeat("AB", 32)+`]}
`)
	want := policy.Policy{
		Algorithm: bucket.TokenBucket, LeaseSize: new(int64(10)), LeaseSeconds: 5,
		Upstreams: map[string]policy.Upstream{"u": {
			URL: "http://127.0.0.1:1", TimeoutSeconds: 30, TrustComputeCost: new(true),
			PassHost: new(true), MaxConnections: 4096, ConnectTimeoutSeconds: 5, IdleTimeoutSeconds: 90,
			Health: policy.Health{SlowP95Ms: 800, FastP95Ms: 300, ErrorRate: 0.15, ClearRate: 0.05, Floor: 0.2,
				Decrease: 0.5, Increase: 0.05, MinSamples: 10, Window: 30, MaxAgeSeconds: 60},
		}},
		Routes: map[string]policy.Route{"r": {
			Path: "/r", Upstream: "u", Host: "api.example.com", Quota: policy.Quota{Capacity: 5, RefillRate: 0.5},
			Cost: new(1.0), Kind: policy.HTTP, MaxCost: 1_000_000, MaxBodyBytes: 64 << 20, Refund: []policy.Refund{policy.RefundUnreached},
			Fallback: policy.FallbackLocal, Degrade: policy.DegradeDefer, MaxStaleSeconds: 3600,
			DeferMethods: []string{"GET", "HEAD", "OPTIONS", "PUT", "DELETE"}, Headers: []policy.HeaderFamily{policy.RateLimitHeaders},
			CORS: &policy.CORS{
				AllowedOrigins: []string{"https://app.example.com"}, AllowedMethods: []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"},
				AllowedHeaders: []string{"Accept", "Authorization", "Content-Type", "X-API-Key", "X-Requested-With"}, MaxAgeSeconds: 600,
			},
		}},
		Plans: policy.DefaultPlans(),
		Users: map[string]policy.User{"ann": {Plan: "free", KeyHashes: []string{strings.Repeat("ab", 32)}}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestParseKeepsExplicitZeros(t *testing.T) {
	t.Parallel()
	p := mustParse(t, base+`
routes:
  r: {path: /r, upstream: u, cost: 0}
  d: {path: /d, deny: true}
plans:
  free: {rate: 1, burst: 1, daily_quota: 0}
`)
	if c := p.Routes["r"].Cost; c == nil || *c != 0 {
		t.Errorf("cost is %v, want 0", c)
	}
	if got := p.Plans["free"]; got != (policy.Plan{Rate: 1, Burst: 1}) {
		t.Errorf("plan free is %+v", got)
	}
	if got := p.Plans["enterprise"]; got != policy.DefaultPlans()["enterprise"] {
		t.Errorf("plan enterprise is %+v", got)
	}
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	route := func(fields string) string { return base + "routes:\n  r: {path: /r, upstream: u, " + fields + "}\n" }
	const finite = "finite decimal number"
	for name, c := range map[string]struct {
		doc, path, problem string
	}{
		"empty":             {" \n", "", "empty"},
		"comments only":     {"# nothing\n", "", "empty"},
		"not UTF-8":         {"a: \xff", "", "UTF-8"},
		"no mapping":        {"- a\n", "", "must be a mapping, not a list"},
		"two documents":     {"algorithm: token_bucket\n---\nalgorithm: token_bucket\n", "", "several"},
		"yaml syntax":       {"routes: [a\n", "", "not valid YAML"},
		"json syntax":       {`{"routes": {"r": {"capacity": 1,}}}`, "routes.r", "not valid JSON"},
		"json trailing":     {`{} {}`, "", "more after the end"},
		"json ends early":   {`{"routes": {`, "routes", "ends too early"},
		"json NaN":          {`{"routes": {"r": {"capacity": NaN}}}`, "routes.r.capacity", "not valid JSON"},
		"unknown key":       {base + "bogus: 1\n", "bogus", "unknown key; the keys here are algorithm"},
		"unknown route key": {route("capasity: 1"), "routes.r.capasity", "unknown key"},
		"wrong case":        {base + "Routes: {}\n", "Routes", "unknown key"},
		"yaml duplicate":    {"shadow_mode: true\nshadow_mode: false\n", "shadow_mode", "there twice, first on line 1"},
		"yaml duplicate in": {route("capacity: 1, capacity: 2"), "routes.r.capacity", "there twice"},
		"json duplicate":    {`{"plans":{"free":{"rate":1,` + "\n" + `"rate":2}}}`, "plans.free.rate", "there twice, first on line 1"},
		"json dup escaped":  {`{"shadow_mode":true,"shadow\u005fmode":true}`, "shadow_mode", "there twice"},
		"null":              {"routes:\n", "routes", "has no value"},
		"alias":             {"routes: &a {}\nplans: *a\n", "routes", "anchors"},
		"merge":             {"plans: {free: {<<: {rate: 1}}}\n", "plans.free", "plain word"},
		"tag":               {"shadow_mode: !!bool true\n", "shadow_mode", "tags"},
		"text for number":   {route(`capacity: "20", refill_rate: 1`), "routes.r.capacity", "must be a number, not a text"},
		"number for text":   {route(`host: 12`), "routes.r.host", "must be a text, not a number"},
		"yes is no bool":    {"shadow_mode: yes\n", "shadow_mode", "must be a truth value"},

		"zero capacity":                {route("capacity: 0, refill_rate: 1"), "routes.r.capacity", "from 1 to 100000000; to refuse every request set deny: true"},
		"zero rate":                    {route("capacity: 1, refill_rate: 0"), "routes.r.refill_rate", "set deny: true"},
		"negative":                     {route("capacity: -5, refill_rate: 1"), "routes.r.capacity", "not -5"},
		"negative zero":                {route("capacity: 1, refill_rate: -0.0"), "routes.r.refill_rate", "from 0.000001"},
		"tiny rate":                    {route("capacity: 1, refill_rate: 1e-7"), "routes.r.refill_rate", "from 0.000001"},
		"NaN":                          {route("capacity: .nan, refill_rate: 1"), "routes.r.capacity", finite},
		"NaN text":                     {route("capacity: NaN, refill_rate: 1"), "routes.r.capacity", "a number"},
		"infinite":                     {route("capacity: 1, refill_rate: .inf"), "routes.r.refill_rate", finite},
		"1e309":                        {route("capacity: 1e309, refill_rate: 1"), "routes.r.capacity", "from 1 to 100000000"},
		"1e308":                        {route("capacity: 1, refill_rate: 1e308"), "routes.r.refill_rate", "to 100000000"},
		"json 1e309":                   {`{"routes":{"r":{"cost":1e309}}}`, "routes.r.cost", "from 0 to 100000000, not"},
		"fraction":                     {route("capacity: 1.5, refill_rate: 1"), "routes.r.capacity", "whole number"},
		"hex":                          {route("capacity: 0x10, refill_rate: 1"), "routes.r.capacity", finite},
		"octal":                        {route("capacity: 010, refill_rate: 1"), "routes.r.capacity", finite},
		"underscores":                  {route("capacity: 1_000, refill_rate: 1"), "routes.r.capacity", finite},
		"no connections":               {"upstreams: {u: {url: http://h, max_connections: 0}}", "upstreams.u.max_connections", "from 1 to 65536"},
		"no patience":                  {"upstreams: {u: {url: http://h, connect_timeout_seconds: 0}}", "upstreams.u.connect_timeout_seconds", "from 0.001 to 60"},
		"idle for ever":                {"upstreams: {u: {url: http://h, idle_timeout_seconds: 1e9}}", "upstreams.u.idle_timeout_seconds", "to 3600"},
		"no lease's life":              {route("lease_seconds: 0"), "routes.r.lease_seconds", "set lease_size: 0"},
		"part of a lease":              {"lease_size: 1.5\n" + base, "lease_size", "whole number"},
		"odd fallback":                 {route("fallback: maybe"), "routes.r.fallback", "must be local, open or closed, not maybe"},
		"odd degrade":                  {route("degrade: later"), "routes.r.degrade", "must be cache, defer or off, not later"},
		"endless staleness":            {route("max_stale_seconds: 1000000"), "routes.r.max_stale_seconds", "from 1 to 604800"},
		"nothing deferred":             {route("defer_methods: []"), "routes.r.defer_methods", "set degrade: off"},
		"odd deferred method":          {route("defer_methods: [GET, post]"), "routes.r.defer_methods[1]", "must be an HTTP method in capitals"},
		"odd refund":                   {route("refund: [reset, never]"), "routes.r.refund[1]", "must be unreached, reset or timeout, not never"},
		"refund twice":                 {route("refund: [reset, reset]"), "routes.r.refund[1]", "there twice"},
		"no headers":                   {route("headers: []"), "routes.r.headers", "is empty; name ratelimit, x-ratelimit or ietf"},
		"odd headers":                  {route("headers: [ratelimit, draft-3]"), "routes.r.headers[1]", "must be ratelimit, x-ratelimit or ietf, not draft-3"},
		"headers twice":                {route("headers: [ietf, ietf]"), "routes.r.headers[1]", "there twice"},
		"cors of nobody":               {route("cors: {}"), "routes.r.cors.allowed_origins", "must name an origin"},
		"cors of a path":               {route(`cors: {allowed_origins: ["https://a.example/"]}`), "routes.r.cors.allowed_origins[0]", "scheme://host"},
		"cors in capitals":             {route(`cors: {allowed_origins: ["https://A.example"]}`), "routes.r.cors.allowed_origins[0]", "lower case"},
		"cors of two *":                {route(`cors: {allowed_origins: ["https://*.*.example"]}`), "routes.r.cors.allowed_origins[0]", "at most one *"},
		"cors of all with credentials": {route(`cors: {allowed_origins: ["*"], allow_credentials: true}`), "routes.r.cors.allowed_origins[0]", "browsers refuse it"},
		"cors method":                  {route(`cors: {allowed_origins: ["*"], allowed_methods: [get]}`), "routes.r.cors.allowed_methods[0]", "in capitals"},
		"cors header":                  {route(`cors: {allowed_origins: ["*"], expose_headers: ["X-A: b"]}`), "routes.r.cors.expose_headers[0]", "name of a header"},
		"cors no header":               {route(`cors: {allowed_origins: ["*"], allowed_headers: []}`), "routes.r.cors.allowed_headers", "is empty"},
		"cors max age":                 {route(`cors: {allowed_origins: ["*"], max_age_seconds: 86400}`), "routes.r.cors.max_age_seconds", "from 1 to 3600"},
		"negative cost":                {route("cost: -5"), "routes.r.cost", "from 0 to"},
		"cost above max":               {route("cost: 3, max_cost: 2"), "routes.r.cost", "max_cost"},
		"capacity only":                {route("capacity: 1"), "routes.r.refill_rate", "must be set, as capacity is"},
		"rate only":                    {route("refill_rate: 1"), "routes.r.capacity", "must be set"},
		"debt only":                    {route("max_debt: 1"), "routes.r.capacity", "must be set"},
		"window only":                  {route("capacity: 1, refill_rate: 1, window_seconds: 2"), "routes.r.sliding_limit", "must be set"},
		"wrong algorithm":              {route("capacity: 1, refill_rate: 1, algorithm: sliding_window"), "routes.r.sliding_limit", "sliding_window"},
		"policy's algorithm": {"algorithm: sliding_window\n" + route("capacity: 1, refill_rate: 1"),
			"routes.r.window_seconds", "the algorithm in force is sliding_window"},
		"daily as algorithm": {route("algorithm: daily_quota"), "routes.r.algorithm", "token_bucket or sliding_window"},
		"override lacks":     {route("plans: {free: {capacity: 1}}"), "routes.r.plans.free.refill_rate", "must be set"},
		"override empty":     {route("plans: {free: {}}"), "routes.r.plans.free", "is empty"},
		"override nowhere":   {route("plans: {gold: {capacity: 1, refill_rate: 1}}"), "routes.r.plans.gold", "no plan gold; the plans are enterprise, free"},
		"override of none":   {route("users: {ann: {capacity: 1, refill_rate: 1}}"), "routes.r.users.ann", "no user ann"},

		"no upstream":        {base + "routes: {r: {path: /r}}\n", "routes.r.upstream", "the upstreams are u"},
		"upstream nowhere":   {base + "routes: {r: {path: /r, upstream: v}}\n", "routes.r.upstream", "no upstream v"},
		"no path":            {base + "routes: {r: {upstream: u}}\n", "routes.r.path", "begin with /"},
		"unclean path":       {base + "routes: {r: {path: /a/../b, upstream: u}}\n", "routes.r.path", `write "/b"`},
		"final slash":        {base + "routes: {r: {path: /a/, upstream: u}}\n", "routes.r.path", "clean"},
		"query in path":      {base + "routes: {r: {path: '/a?b', upstream: u}}\n", "routes.r.path", "decoded"},
		"host with port":     {route("host: 'a:80'"), "routes.r.host", "without a port"},
		"small method":       {route("methods: [get]"), "routes.r.methods[0]", "capitals"},
		"same place":         {route("methods: [GET]") + "  s: {path: /r, upstream: u, methods: [PUT, GET]}\n", "routes.s.path", "routes.r takes the same requests"},
		"bad route name":     {base + "routes: {Fast: {path: /r, upstream: u}}\n", "routes.Fast", "a-z"},
		"scope as name":      {base + "routes: {'@plan': {path: /r, upstream: u}}\n", `routes."@plan"`, "a-z"},
		"bad upstream name":  {"upstreams: {a.b: {url: 'http://h'}}\n", `upstreams."a.b"`, "a-z"},
		"url scheme":         {"upstreams: {a: {url: 'ftp://h'}}\n", "upstreams.a.url", "http(s)"},
		"url user":           {"upstreams: {a: {url: 'http://u:p@h'}}\n", "upstreams.a.url", "without user"},
		"url missing":        {"upstreams: {a: {}}\n", "upstreams.a.url", "must be set"},
		"url query":          {"upstreams: {a: {url: 'http://h/?x'}}\n", "upstreams.a.url", "query"},
		"health order":       {"upstreams: {a: {url: 'http://h', health: {slow_p95_ms: 200}}}\n", "upstreams.a.health.fast_p95_ms", "below slow_p95_ms"},
		"health clear":       {"upstreams: {a: {url: 'http://h', health: {error_rate: 0.01}}}\n", "upstreams.a.health.clear_error_rate", "error_rate"},
		"health samples":     {"upstreams: {a: {url: 'http://h', health: {window: 5}}}\n", "upstreams.a.health.min_samples", "window"},
		"health floor":       {"upstreams: {a: {url: 'http://h', health: {floor: 0.1}}}\n", "upstreams.a.health.floor", "from 0.2 to 1"},
		"url and urls":       {"upstreams: {a: {url: 'http://h', urls: ['http://i']}}\n", "upstreams.a.urls", "not both"},
		"urls twice":         {"upstreams: {a: {urls: ['http://h', 'http://h']}}\n", "upstreams.a.urls[1]", "twice"},
		"urls query":         {"upstreams: {a: {urls: ['http://h', 'http://h/?x']}}\n", "upstreams.a.urls[1]", "query"},
		"kind":               {route("kind: grpc"), "routes.r.kind", "http or llm"},
		"llm without kind":   {route("llm: {}"), "routes.r.llm", "kind: llm"},
		"llm deferred":       {route("kind: llm, degrade: defer"), "routes.r.degrade", "must be off"},
		"llm zero":           {route("kind: llm, llm: {default_tokens: 0}"), "routes.r.llm.default_tokens", "from 1"},
		"tpm zero":           {"plans: {p: {tpm: 0}}\n", "plans.p.tpm", "for no limit leave it out"},
		"rpm NaN":            {"users: {a: {rpm: .nan, key_hashes: []}}\n", "users.a.rpm", finite},
		"strategy":           {"profiles: {p: {routingStrategy: best}}\n", "profiles.p.routingStrategy", "least-request, round-robin or random"},
		"rate zero":          {"profiles: {p: {requestsPerSecond: 0}}\n", "profiles.p.requestsPerSecond", "from 1"},
		"model rate huge":    {"profiles: {p: {models: [{model: m, requestsPerSecond: 1e12}]}}\n", "profiles.p.models[0].requestsPerSecond", "from 1"},
		"model without rate": {"profiles: {p: {models: [{model: m}]}}\n", "profiles.p.models[0].requestsPerSecond", "must be set"},
		"model twice":        {"profiles: {p: {models: [{model: m, requestsPerSecond: 1}, {model: m, requestsPerSecond: 2}]}}\n", "profiles.p.models[1].model", "twice"},
		"model nameless":     {"profiles: {p: {models: [{requestsPerSecond: 1}]}}\n", "profiles.p.models[0].model", "name of a model"},
		"burst only":         {"plans: {p: {burst: 1}}\n", "plans.p.rate", "both or neither"},
		"rate without burst": {"plans: {p: {rate: 1}}\n", "plans.p.burst", "both or neither"},
		"zero plan rate":     {"plans: {p: {rate: 0, burst: 1}}\n", "plans.p.rate", "unlimited"},
		"anonymous nowhere":  {"anonymous_plan: gold\n", "anonymous_plan", "no plan gold"},
		"plan nowhere":       {"users: {a: {plan: gold, key_hashes: []}}\n", "users.a.plan", "no plan gold"},
		"plain key":          {"users: {a: {key_hashes: [secret]}}\n", "users.a.key_hashes[0]", "SHA-256"},
		"key of two":         {"users: {a: {key_hashes: [" + strings.Repeat("ab", 32) + "]}, b: {key_hashes: [" + strings.Repeat("AB", 32) + "]}}\n", "users.b.key_hashes[0]", "users.a already"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := policy.Parse([]byte(c.doc))
			wantProblem(t, err, c.path, c.problem)
		})
	}
}

func TestParseNamesLines(t *testing.T) {
	t.Parallel()
	yaml := "upstreams:\n  u: {url: 'http://h'}\nroutes:\n  r:\n    path: /r\n    upstream: u\n    %s\n"
	json := "{\"upstreams\": {\"u\": {\"url\": \"http://h\"}},\n \"routes\": {\n\"r\": {\"path\": \"/r\",\n\"upstream\": \"u\",\n\n\n %s}}}"
	for name, c := range map[string]struct {
		doc, path string
		line      int
	}{
		"yaml unknown":  {fmt.Sprintf(yaml, "bogus: 1"), "routes.r.bogus", 7},
		"yaml bound":    {fmt.Sprintf(yaml, "capacity: 0"), "routes.r.capacity", 7},
		"yaml absent":   {fmt.Sprintf(yaml, "capacity: 1"), "routes.r.refill_rate", 4},
		"yaml relation": {fmt.Sprintf(yaml, "host: 'a:1'"), "routes.r.host", 7},
		"yaml method":   {fmt.Sprintf(yaml, "methods: [GET,\n     get]"), "routes.r.methods[1]", 8},
		"json unknown":  {fmt.Sprintf(json, `"bogus": 1`), "routes.r.bogus", 7},
		"json relation": {fmt.Sprintf(json, `"host": "a:1"`), "routes.r.host", 7},
		"yaml syntax":   {"routes:\n  r: {\n", "", 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := policy.Parse([]byte(c.doc))
			errs := errorsOf(t, err)
			if errs[0].Path != c.path || errs[0].Line != c.line {
				t.Errorf("got %q on line %d, want %q on line %d (%v)", errs[0].Path, errs[0].Line, c.path, c.line, err)
			}
		})
	}
}

// Each of these would cost minutes or gigabytes if it were read before it is
// bounded. Work is measured in bytes allocated, which a busy machine does not
// change; so nothing may run beside this test.
func TestBombsAreRefusedFast(t *testing.T) {
	var wide, indented, routes strings.Builder
	for wide.Len() < 900_000 {
		fmt.Fprintf(&wide, "k%d: 1\n", wide.Len())
	}
	for i := range 1000 {
		fmt.Fprintf(&indented, "%sa:\n", strings.Repeat(" ", i))
	}
	routes.WriteString(base + "routes:\n")
	for i := range policy.MaxRoutes + 1 {
		fmt.Fprintf(&routes, "  r%d: {path: /r%d, upstream: u}\n", i, i)
	}
	laughs := "a: &a [x,x,x,x,x,x,x,x,x]\n"
	for c := 'b'; c < 'k'; c++ {
		laughs += fmt.Sprintf("%c: &%c [%s]\n", c, c, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*%c,", c-1), 9), ","))
	}
	for name, c := range map[string]struct{ doc, problem string }{
		"json deep":      {strings.Repeat(`{"a":`, 10_000) + "1" + strings.Repeat("}", 10_000), "levels deep"},
		"json lists":     {`{"a":` + strings.Repeat("[", 500_000), "levels deep"},
		"yaml flow":      {"a: " + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000), "levels deep"},
		"yaml dashes":    {strings.Repeat("- ", 10_000) + "x", "levels deep"},
		"yaml questions": {strings.Repeat("? ", 10_000) + "x", "levels deep"},
		"yaml indented":  {indented.String(), "levels deep"},
		"yaml wide":      {wide.String(), "keys in one mapping"},
		"yaml flow wide": {"a: {" + strings.ReplaceAll(wide.String(), "\n", ",") + "}", "keys in one mapping"},
		"yaml laughs":    {laughs, "anchors"},
		"too large":      {"a: " + strings.Repeat("x", policy.MaxDocument), "bytes"},
		"too many":       {routes.String(), "at most 1000"},
		"long number":    {base + "routes: {r: {path: /r, upstream: u, cost: " + strings.Repeat("9", 900_000) + "}}", "from 0 to"},
		"long exponent":  {base + "routes: {r: {path: /r, upstream: u, cost: 1e" + strings.Repeat("9", 900_000) + "}}", "from 0 to"},
		"long key":       {`{"` + strings.Repeat("k", 900_000) + `": 1}`, "unknown key"},
	} {
		t.Run(name, func(t *testing.T) {
			const most = 256 << 20
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := policy.Parse([]byte(c.doc))
			runtime.ReadMemStats(&after)
			if took := after.TotalAlloc - before.TotalAlloc; took > most {
				t.Errorf("took %d MiB, at most %d are allowed", took>>20, most>>20)
			}
			if err == nil || !strings.Contains(err.Error(), c.problem) {
				t.Errorf("got %.300v, want %q", err, c.problem)
			}
			if err != nil && len(err.Error()) > 20_000 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		})
	}
}

func TestErrorsAreBounded(t *testing.T) {
	t.Parallel()
	var doc bytes.Buffer
	doc.WriteString(`{"x0":1`)
	for i := 1; i < 5000; i++ {
		fmt.Fprintf(&doc, `,"x%d":1`, i)
	}
	doc.WriteString("}")
	_, err := policy.Parse(doc.Bytes())
	if errs := errorsOf(t, err); len(errs) != 51 || !strings.Contains(errs[50].Problem, "more problems") {
		t.Errorf("got %d errors, last %v", len(errs), errs[len(errs)-1])
	}
}

func TestReceiveDropsUnknownKeysOnly(t *testing.T) {
	t.Parallel()
	p, dropped, err := policy.Receive([]byte(`{"upstreams":{"u":{"url":"http://h","pool":3}},"routes":{"r":{"path":"/r","upstream":"u","capacity":2,"refill_rate":1,"new":{"a":[1,{"b":null}]}}},"later":true}`))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"upstreams.u.pool", "routes.r.new", "later"}, dropped); diff != "" {
		t.Errorf("dropped (-want +got)\n%s", diff)
	}
	if p.Routes["r"].Capacity != 2 {
		t.Errorf("got %+v", p.Routes["r"])
	}
	for name, doc := range map[string]string{
		"bad value": `{"later":1,"routes":{"r":{"path":"/r","capacity":-1}}}`,
		"bad kind":  `{"algorithm":"leaky_bucket"}`,
		"duplicate": `{"later":1,"later":2}`,
		"yaml":      "shadow_mode: true\n",
		"deep":      `{"later":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`,
	} {
		if p, _, err := policy.Receive([]byte(doc)); err == nil {
			t.Errorf("%s: received %+v", name, p)
		} else if !cmp.Equal(p, policy.Policy{}) {
			t.Errorf("%s: a refused document left %+v", name, p)
		}
	}
}

func TestValidateChecksPoliciesMadeInGo(t *testing.T) {
	t.Parallel()
	nan := 0.0
	nan /= nan
	p := policy.Policy{
		Upstreams: map[string]policy.Upstream{"u": {URL: "http://h"}},
		Routes: map[string]policy.Route{
			"r": {Path: "/r", Upstream: "u", Cost: &nan, Quota: policy.Quota{Capacity: -1, RefillRate: nan}},
		},
	}
	err := p.Validate()
	wantProblem(t, err, "routes.r.cost", "number from")
	wantProblem(t, err, "routes.r.capacity", "not -1")
	wantProblem(t, err, "routes.r.refill_rate", "number from")
	if _, err := policy.Encode(p); err == nil {
		t.Error("an invalid policy was encoded")
	}
	if _, err := policy.Compile(p, 1); err == nil {
		t.Error("an invalid policy was compiled")
	}
}

func TestExampleShowsEveryKey(t *testing.T) {
	t.Parallel()
	keys, bounded := policy.Keys()
	for key, ok := range bounded {
		if !ok {
			t.Errorf("the number %s has no bound", key)
		}
	}
	reference, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if !regexp.MustCompile("[`.]" + key + "[`.]").Match(reference) {
			t.Errorf("docs/configuration.md does not explain %s", key)
		}
		if !bytes.Contains(policy.Example(), []byte(key+":")) {
			t.Errorf("example.yaml does not mention %s", key)
		}
	}
	// What is commented out in the example must be valid too, with the value shown being the default.
	plain, err := policy.Parse(policy.Example())
	if err != nil {
		t.Fatal(err)
	}
	doc := string(policy.Example())
	for _, shown := range []string{
		"    # timeout_seconds: 30", "    # trust_compute_cost: true", "    # health:",
		"    # max_cost: 1000000", "    # cost_per_second: 0", "    # expose_compute_cost: false",
		"    # http2: false", "    # pass_host: true", "    # max_connections: 4096", "    # connect_timeout_seconds: 5", "    # idle_timeout_seconds: 90",
		"    # max_body_bytes: 67108864", "    # deny: false", "    # headers: [ratelimit]",
		"    # fallback: local", "    # degrade: defer", "    # max_stale_seconds: 3600", "    # defer_methods: [GET, HEAD, OPTIONS, PUT, DELETE]", "\n# plans:\n",
	} {
		if !strings.Contains(doc, shown) {
			t.Errorf("example.yaml does not show %q", shown)
		}
		doc = strings.Replace(doc, shown, strings.Replace(shown, "# ", "", 1), 1)
	}
	for _, in := range []string{"slow_p95_ms", "fast_p95_ms", "error_rate", "clear_error_rate", "floor", "decrease", "increase", "min_samples", "window", "max_age_seconds"} {
		doc = strings.Replace(doc, "    #   "+in+":", "      "+in+":", 1)
	}
	for _, plan := range []string{"free:  ", "starter:", "growth:  ", "enterprise:"} {
		doc = strings.Replace(doc, "#   "+plan, "  "+plan, 1)
	}
	explicit := mustParse(t, doc)
	if diff := cmp.Diff(plain, explicit); diff != "" {
		t.Errorf("the defaults shown are not the defaults (-default +shown)\n%s", diff)
	}
}

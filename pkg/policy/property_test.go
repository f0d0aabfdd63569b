package policy_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

func mustHex(digest [32]byte) string { return hex.EncodeToString(digest[:]) }

// quotas are usable under either algorithm, so that any may be in force.
func quotas(t *rapid.T, label string) policy.Quota {
	return policy.Quota{
		Capacity:      rapid.Int64Range(1, bucket.MaxTokens).Draw(t, label+" capacity"),
		RefillRate:    rapid.Float64Range(1e-6, bucket.MaxTokens).Draw(t, label+" refill"),
		SlidingLimit:  rapid.Int64Range(1, bucket.MaxTokens).Draw(t, label+" sliding"),
		WindowSeconds: rapid.Int64Range(1, bucket.MaxWindow).Draw(t, label+" window"),
		MaxDebt:       rapid.SampledFrom([]int64{0, 1, bucket.MaxDebt / bucket.One}).Draw(t, label+" debt"),
	}
}

var (
	algorithms = rapid.SampledFrom([]bucket.Kind{bucket.TokenBucket, bucket.SlidingWindow})
	switches   = rapid.SampledFrom([]*bool{nil, new(true), new(false)})
)

// policies are valid and use every part of one.
func policies(t *rapid.T) policy.Policy {
	p := policy.Policy{
		Algorithm: algorithms.Draw(t, "algorithm"), ShadowMode: rapid.Bool().Draw(t, "shadow"),
		LeaseSize: rapid.SampledFrom([]*int64{nil, new(int64(0)), new(int64(7))}).Draw(t, "lease size"),

		Upstreams: map[string]policy.Upstream{}, Routes: map[string]policy.Route{}, Plans: policy.DefaultPlans(), Users: map[string]policy.User{},
		AnonymousPlan: rapid.SampledFrom([]string{"", "free", "p0"}).Draw(t, "anonymous"),
	}
	if rapid.Bool().Draw(t, "profiles") {
		p.Profiles = map[string]policy.Profile{"p": {
			RoutingStrategy:   rapid.SampledFrom([]policy.RoutingStrategy{"", policy.LeastRequest, policy.Random}).Draw(t, "strategy"),
			RequestsPerSecond: rapid.Int64Range(0, policy.MaxPerWindow).Draw(t, "per second"),
			Models:            rapid.SampledFrom([][]policy.ModelRate{nil, {}, {{Model: "a/b:7 {\"", RequestsPerSecond: 1}}}).Draw(t, "models"),
		}}
	}
	for i := range rapid.IntRange(1, 3).Draw(t, "upstreams") {
		p.Upstreams[fmt.Sprintf("u%d", i)] = policy.Upstream{
			URL:              rapid.SampledFrom([]string{"http://h", "https://10.0.0.1:8443/a%20b", "http://[::1]:1/x<y>&z"}).Draw(t, "url"),
			TimeoutSeconds:   rapid.Float64Range(0.001, 3600).Draw(t, "timeout"),
			TrustComputeCost: switches.Draw(t, "trust"), PassHost: switches.Draw(t, "pass host"),
			HTTP2: rapid.Bool().Draw(t, "http2"), MaxConnections: rapid.Int64Range(0, 65_536).Draw(t, "connections"),
			ConnectTimeoutSeconds: rapid.Float64Range(0.001, 60).Draw(t, "connect"), IdleTimeoutSeconds: rapid.Float64Range(1, 3600).Draw(t, "idle"),
			Health: policy.Health{
				SlowP95Ms: rapid.Float64Range(301, 9999).Draw(t, "slow"), Floor: rapid.Float64Range(0.2, 1).Draw(t, "floor"),
				Window: rapid.IntRange(10, 1000).Draw(t, "window"),
			},
		}
	}
	if rapid.Bool().Draw(t, "several places") {
		u := p.Upstreams["u0"]
		u.URL, u.URLs = "", []string{"http://a", "https://b/c"}
		p.Upstreams["u0"] = u
	}
	p.Plans["p0"] = policy.Plan{
		DailyQuota: rapid.Int64Range(0, bucket.MaxTokens).Draw(t, "daily"),
		RPM:        rapid.Int64Range(0, policy.MaxPerWindow).Draw(t, "rpm"), TPM: rapid.Int64Range(0, policy.MaxPerWindow).Draw(t, "tpm"),
	}
	for i := range rapid.IntRange(0, 3).Draw(t, "users") {
		key := make([]byte, 32)
		key[0] = byte(i)
		p.Users[fmt.Sprintf("a%d", i)] = policy.User{
			Plan: rapid.SampledFrom([]string{"", "free", "p0"}).Draw(t, "plan"), Admin: rapid.Bool().Draw(t, "admin"),
			KeyHashes: []string{hex.EncodeToString(key)},
		}
	}
	for i := range rapid.IntRange(0, 4).Draw(t, "routes") {
		r := policy.Route{
			Path: fmt.Sprintf("/r%d", i), Host: rapid.SampledFrom([]string{"", "a.example", "::1"}).Draw(t, "host"),
			Methods:  rapid.SampledFrom([][]string{nil, {}, {"GET"}, {"GET", "M-SEARCH"}}).Draw(t, "methods"),
			Upstream: "u0", Deny: rapid.Bool().Draw(t, "deny"),
			Algorithm:  rapid.SampledFrom([]bucket.Kind{"", bucket.TokenBucket, bucket.SlidingWindow}).Draw(t, "algorithm"),
			ShadowMode: switches.Draw(t, "shadow"), ExposeComputeCost: rapid.Bool().Draw(t, "expose"),
			CostPerSecond: rapid.Float64Range(0, bucket.MaxTokens).Draw(t, "per second"),
			MaxBodyBytes:  rapid.Int64Range(0, 1<<40).Draw(t, "body"),
			Headers:       rapid.SampledFrom([][]policy.HeaderFamily{nil, {policy.IETFHeaders}, {policy.XRateLimitHeaders, policy.RateLimitHeaders}}).Draw(t, "headers"),
			Fallback:      rapid.SampledFrom([]policy.Fallback{"", policy.FallbackLocal, policy.FallbackOpen, policy.FallbackClosed}).Draw(t, "fallback"),
			Degrade:       rapid.SampledFrom([]policy.Degrade{"", policy.DegradeCache, policy.DegradeDefer, policy.DegradeOff}).Draw(t, "degrade"),
			Refund:        rapid.SampledFrom([][]policy.Refund{nil, {}, {policy.RefundTimeout}, {policy.RefundReset, policy.RefundUnreached}}).Draw(t, "refund"),
			DeferMethods:  rapid.SampledFrom([][]string{nil, {"POST"}}).Draw(t, "defer methods"),
			CORS: rapid.SampledFrom([]*policy.CORS{
				nil, {AllowedOrigins: []string{"*"}},
				{AllowedOrigins: []string{"https://*.example.com:8443", "null"}, AllowedMethods: []string{"GET"}, AllowedHeaders: []string{"*"}, ExposeHeaders: []string{}, AllowCredentials: true, MaxAgeSeconds: 1},
			}).Draw(t, "cors"),
		}
		if rapid.Bool().Draw(t, "llm") {
			r.Kind, r.Degrade = policy.LLMs, ""
			r.LLM = rapid.SampledFrom([]*policy.LLM{nil, {}, {MaxReserve: 7, AddUsage: new(false), InspectBytes: 1 << 10}}).Draw(t, "reckoning")
		}
		if rapid.Bool().Draw(t, "priced") {
			r.Cost = new(rapid.Float64Range(0, 1_000_000).Draw(t, "cost"))
		}
		if rapid.Bool().Draw(t, "limited") {
			r.Quota = quotas(t, "route")
		}
		r.Plans, r.Users = map[string]policy.Quota{}, map[string]policy.Quota{}
		if rapid.Bool().Draw(t, "by plan") {
			r.Plans["free"] = quotas(t, "plan")
		}
		if _, ok := p.Users["a0"]; ok && rapid.Bool().Draw(t, "by user") {
			r.Users["a0"] = quotas(t, "user")
		}
		p.Routes[fmt.Sprintf("r%d", i)] = r
	}
	return p
}

// Whoever reads what Encode wrote has the same policy, and writes the same bytes.
func TestPropertyEncodeIsReadBack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		doc, err := policy.Encode(policies(t))
		if err != nil {
			t.Fatal(err)
		}
		parsed, err := policy.Parse(doc)
		if err != nil {
			t.Fatalf("Parse: %v\n%s", err, doc)
		}
		received, dropped, err := policy.Receive(doc)
		if err != nil || len(dropped) != 0 {
			t.Fatalf("Receive: %v, dropped %v", err, dropped)
		}
		if diff := cmp.Diff(parsed, received); diff != "" {
			t.Fatalf("Parse and Receive differ\n%s", diff)
		}
		again, err := policy.Encode(parsed)
		if err != nil || !bytes.Equal(doc, again) {
			t.Fatalf("encoded again: %v\n%s\n%s", err, doc, again)
		}
		// The strict walk must agree with encoding/json on what the document says.
		var plain policy.Policy
		if err := json.Unmarshal(doc, &plain); err != nil {
			t.Fatal(err)
		}
		if again, err := policy.Encode(plain); err != nil || !bytes.Equal(doc, again) {
			t.Fatalf("read by encoding/json: %v\n%s\n%s", err, doc, again)
		}
		if _, err := policy.Compile(parsed, 1); err != nil {
			t.Fatal(err)
		}
	})
}

// A patch of any subset of fields, some of them bad, is applied whole or not at all.
func TestPropertyPatchIsWholeOrNothing(t *testing.T) {
	t.Parallel()
	type choice struct{ good, bad []string }
	choices := map[string]choice{
		"algorithm":      {[]string{`"token_bucket"`, `"sliding_window"`}, []string{`"leaky"`, `1`}},
		"shadow_mode":    {[]string{`true`, `false`}, []string{`"true"`, `null`}},
		"capacity":       {[]string{`1`, `100000000`}, []string{`0`, `-1`, `1e309`, `1.5`}},
		"refill_rate":    {[]string{`0.000001`, `3.25`}, []string{`0`, `-0.5`, `1e308`, `"1"`}},
		"sliding_limit":  {[]string{`1`, `77`}, []string{`0`, `1e-9`, `[]`}},
		"window_seconds": {[]string{`1`, `2678400`}, []string{`2678401`, `{}`}},
		"max_debt":       {[]string{`1`, `1000000000`}, []string{`1000000001`, `0`}},
		"bogus":          {nil, []string{`1`}},
	}
	before, err := policy.Parse(policy.Example())
	if err != nil {
		t.Fatal(err)
	}
	frozen, err := policy.Encode(before)
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		doc, bad := map[string]any{}, false
		in10 := func(n int, label string) bool { return rapid.IntRange(0, 9).Draw(t, label) < n }
		put := func(into map[string]any, key string) {
			c := choices[key]
			value := rapid.SampledFrom(slices.Concat(c.good, c.bad)).Draw(t, key)
			into[key] = json.RawMessage(value)
			bad = bad || slices.Contains(c.bad, value)
		}
		for _, key := range []string{"algorithm", "shadow_mode"} {
			if in10(3, "top") {
				put(doc, key)
			}
		}
		if in10(1, "bogus") {
			put(doc, "bogus")
		}
		routes := map[string]any{}
		for i, route := range []string{"fast", "slow", "nowhere"} {
			if !in10([]int{4, 4, 1}[i], route) {
				continue
			}
			bad = bad || route == "nowhere"
			fields := map[string]any{}
			for _, key := range []string{"algorithm", "shadow_mode", "capacity", "refill_rate", "sliding_limit", "window_seconds", "max_debt"} {
				if in10(2, "field") {
					put(fields, key)
				}
			}
			routes[route] = fields
		}
		if len(routes) > 0 {
			doc["routes"] = routes
		}
		patch, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}

		next, changed, err := policy.Patch(before, patch)
		if now, e := policy.Encode(before); e != nil || !bytes.Equal(frozen, now) {
			t.Fatalf("the patched policy was touched by %s", patch)
		}
		if bad {
			if err == nil || len(changed) > 0 || !cmp.Equal(next, policy.Policy{}) {
				t.Fatalf("%s: got error %v, changed %v", patch, err, changed)
			}
			return
		}
		if err != nil {
			t.Fatalf("%s: %v", patch, err)
		}
		// Every value of the patch is in the new document, and nothing else is another.
		want := tree(t, frozen)
		merge(want, tree(t, patch))
		got, err := policy.Encode(next)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, tree(t, got)); diff != "" {
			t.Fatalf("%s (-want +got)\n%s", patch, diff)
		}
		if (len(changed) == 0) != bytes.Equal(frozen, got) {
			t.Fatalf("%s: changed %v, but documents equal: %v", patch, changed, bytes.Equal(frozen, got))
		}
	})
}

func tree(t *rapid.T, doc []byte) map[string]any {
	var m map[string]any
	if err := json.Unmarshal(doc, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

func merge(into, patch map[string]any) {
	for k, v := range patch {
		sub, nested := v.(map[string]any)
		if old, ok := into[k].(map[string]any); nested && ok {
			merge(old, sub)
			continue
		}
		maps.Copy(into, map[string]any{k: v})
	}
}

func FuzzParse(f *testing.F) {
	f.Add(policy.Example())
	f.Add([]byte(`{"upstreams":{"u":{"url":"http://h"}},"routes":{"r":{"path":"/","upstream":"u","capacity":1e0,"refill_rate":1}}}`))
	f.Add([]byte("a: &x [*x]\n? {b: |\n c}\n: !!t d\n--- \n<<: *x"))
	f.Fuzz(func(t *testing.T, doc []byte) {
		p, err := policy.Parse(doc)
		if err != nil {
			errorsOf(t, err)
			return
		}
		roundTrip(t, p)
	})
}

func FuzzReceive(f *testing.F) {
	f.Add([]byte(`{"upstreams":{"u":{"url":"http://h"}},"routes":{"r":{"path":"/","upstream":"u","capacity":1e0,"refill_rate":1}},"x":[{}]}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		p, dropped, err := policy.Receive(doc)
		if err != nil {
			errorsOf(t, err)
			return
		}
		roundTrip(t, p)
		// Parse is Receive without the leniency.
		if _, err := policy.Parse(doc); (err == nil) != (len(dropped) == 0) {
			t.Fatalf("dropped %v, but Parse says %v", dropped, err)
		}
	})
}

func roundTrip(t *testing.T, p policy.Policy) {
	doc, err := policy.Encode(p)
	if err != nil {
		t.Fatalf("what was read can't be encoded: %v", err)
	}
	again, err := policy.Parse(doc)
	if err != nil {
		t.Fatalf("what was encoded can't be read: %v", err)
	}
	if diff := cmp.Diff(p, again); diff != "" {
		t.Fatal(diff)
	}
	table, err := policy.Compile(p, 1)
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range p.Routes {
		method := "GET"
		if len(r.Methods) > 0 {
			method = r.Methods[0]
		}
		if got := table.Match(method, r.Host, r.Path); got == nil || got.Name != name {
			t.Fatalf("route %s is not found at its own path: %v", name, got)
		}
	}
}

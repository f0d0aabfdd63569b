package policy_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

const overridePolicy = `
upstreams: {up: {url: http://127.0.0.1:1}}
routes:
  r: {path: /r, upstream: up, capacity: 20, refill_rate: 10, sliding_limit: 20, window_seconds: 2, plans: {growth: {capacity: 200, refill_rate: 100}}}
  free: {path: /free, upstream: up}
`

// TestOverridesGoFirst: the client's limit on a route is the first of (user, route), (plan, route),
// route that is set; over all routes the first of (user, any), plan.
func TestOverridesGoFirst(t *testing.T) {
	t.Parallel()
	own := policy.Override{Route: "r", Quota: policy.Quota{Capacity: 3, RefillRate: 1}}
	all := policy.Override{Plan: policy.Plan{Rate: 7, Burst: 9, DailyQuota: 11}}
	for _, tc := range []struct {
		name      string
		plan      string
		algorithm string
		overrides []policy.Override
		want      map[string]int64 // capacity by scope
	}{
		{"none", "free", "token_bucket", nil, map[string]int64{"r": 20, bucket.ScopePlan: 20, bucket.ScopeDay: 10_000}},
		{"route", "growth", "token_bucket", []policy.Override{own}, map[string]int64{"r": 3, bucket.ScopePlan: 500, bucket.ScopeDay: 1_000_000}},
		{"all routes", "growth", "token_bucket", []policy.Override{all}, map[string]int64{"r": 200, bucket.ScopePlan: 9, bucket.ScopeDay: 11}},
		{"both", "", "token_bucket", []policy.Override{all, own}, map[string]int64{"r": 3, bucket.ScopePlan: 9, bucket.ScopeDay: 11}},
		{"not of the algorithm in force", "", "sliding_window", []policy.Override{own}, map[string]int64{"r": 20}},
		{"a plan that is gone", "bygone", "token_bucket", nil, map[string]int64{"r": 20}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p, err := policy.Parse([]byte("algorithm: " + tc.algorithm + overridePolicy))
			if err != nil && tc.algorithm == "token_bucket" {
				t.Fatal(err)
			}
			if err != nil { // growth's override has no window; it is not what this is about
				p, err = policy.Parse([]byte("algorithm: " + tc.algorithm + strings.Replace(overridePolicy, ", plans: {growth: {capacity: 200, refill_rate: 100}}", "", 1)))
				if err != nil {
					t.Fatal(err)
				}
			}
			table, err := policy.Compile(p, 1)
			if err != nil {
				t.Fatal(err)
			}
			user := policy.UserRules{Name: "ann", Plan: tc.plan}
			if tc.overrides != nil {
				user.Overrides = &tc.overrides
			}
			got := map[string]int64{}
			for _, l := range table.Limits(table.Route("r"), user, true) {
				got[l.Scope] = l.Capacity
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestOverrideValidate(t *testing.T) {
	t.Parallel()
	p, err := policy.Parse([]byte(overridePolicy))
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		o    policy.Override
		want string // in the error; "": none
	}{
		{policy.Override{Route: "r", Quota: policy.Quota{Capacity: 3, RefillRate: 1}}, ""},
		{policy.Override{Plan: policy.Plan{DailyQuota: 1}}, ""},
		{policy.Override{}, "is empty"},
		{policy.Override{Route: "r"}, "is empty"},
		{policy.Override{Route: "nowhere", Quota: policy.Quota{Capacity: 3, RefillRate: 1}}, "no route nowhere"},
		{policy.Override{Route: "r", Quota: policy.Quota{Capacity: 3}}, "o.refill_rate: must be set"},
		{policy.Override{Route: "r", Quota: policy.Quota{SlidingLimit: 3, WindowSeconds: 1}}, "algorithm in force"},
		{policy.Override{Route: "r", Plan: policy.Plan{Rate: 1, Burst: 1}}, "over all routes"},
		{policy.Override{Quota: policy.Quota{Capacity: 3, RefillRate: 1}}, "needs a route"},
		{policy.Override{Plan: policy.Plan{Rate: 1}}, "o.burst: must be set"},
		{policy.Override{Plan: policy.Plan{Rate: -1, Burst: 1}}, "o.rate: must be a number"},
	} {
		err := tc.o.Validate(p, "o")
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%+v: got %v, want %q", tc.o, err, tc.want)
		}
	}
	now := time.Now()
	if o := (policy.Override{Expires: now}); o.Live(now) || !o.Live(now.Add(-1)) || !(policy.Override{}).Live(now) {
		t.Error("an override ends at Expires, and without one never")
	}
}

func TestDecodeIsStrict(t *testing.T) {
	t.Parallel()
	var o policy.Override
	if err := policy.Decode([]byte(`{"route":"r","capacity":3,"refill_rate":0.5,"expires":"2030-01-02T03:04:05+01:00"}`), &o); err != nil {
		t.Fatal(err)
	}
	want := policy.Override{Route: "r", Quota: policy.Quota{Capacity: 3, RefillRate: 0.5}, Expires: time.Date(2030, 1, 2, 2, 4, 5, 0, time.UTC)}
	if o != want {
		t.Errorf("got %+v, want %+v", o, want)
	}
	for doc, path := range map[string]string{
		`{"capacityy":3}`: "capacityy", `{"capacity":0}`: "capacity", `{"capacity":1e309}`: "capacity",
		`{"expires":"tomorrow"}`: "expires", `{"expires":7}`: "expires", `[]`: "",
	} {
		var errs policy.Errors
		if err := policy.Decode([]byte(doc), new(policy.Override)); !errors.As(err, &errs) || errs[0].Path != path {
			t.Errorf("%s: got %v, want a problem at %q", doc, err, path)
		}
	}
}

func TestDiff(t *testing.T) {
	t.Parallel()
	from, err := policy.Parse([]byte(overridePolicy))
	if err != nil {
		t.Fatal(err)
	}
	to := from.WithPlans(map[string]policy.Plan{"gold": {Rate: 1, Burst: 2}})
	to.ShadowMode = true
	r := to.Routes["r"]
	r.Capacity = 21
	to.Routes["r"] = r
	delete(to.Routes, "free")
	diff, err := policy.Diff(from, to)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, d := range diff {
		if d.Path == "routes.free" { // whole, and long
			got = append(got, d.Path+" gone: "+string(d.To))
			continue
		}
		got = append(got, d.String())
	}
	want := []string{`plans.gold: null → {"rate":1,"burst":2}`, "routes.free gone: null", "routes.r.capacity: 20 → 21", "shadow_mode: false → true"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if same, err := policy.Diff(from, from); err != nil || len(same) != 0 {
		t.Errorf("got %v, %v, want nothing", same, err)
	}
}

package policy_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

func example(t *testing.T) policy.Policy {
	t.Helper()
	return mustParse(t, string(policy.Example()))
}

func TestPatchChangesWhatItNames(t *testing.T) {
	t.Parallel()
	p := example(t)
	next, changed, err := policy.Patch(p, []byte(`{
		"algorithm": "sliding_window", "shadow_mode": true,
		"routes": {
			"fast": {"capacity": 7, "refill_rate": 0.5, "max_debt": 9, "shadow_mode": false},
			"slow": {"algorithm": "token_bucket", "sliding_limit": 20, "window_seconds": 3}
		}}`))
	if err != nil {
		t.Fatal(err)
	}
	want := example(t)
	want.Algorithm, want.ShadowMode = bucket.SlidingWindow, true
	fast, slow := want.Routes["fast"], want.Routes["slow"]
	fast.Capacity, fast.RefillRate, fast.MaxDebt, fast.ShadowMode = 7, 0.5, 9, new(false)
	slow.Algorithm, slow.WindowSeconds = bucket.TokenBucket, 3
	want.Routes["fast"], want.Routes["slow"] = fast, slow
	if diff := cmp.Diff(want, next); diff != "" {
		t.Errorf("next (-want +got)\n%s", diff)
	}
	wantChanged := []string{"algorithm", "routes.fast.capacity", "routes.fast.max_debt", "routes.fast.refill_rate",
		"routes.fast.shadow_mode", "routes.slow.algorithm", "routes.slow.window_seconds", "shadow_mode"}
	if diff := cmp.Diff(wantChanged, changed); diff != "" {
		t.Errorf("changed (-want +got)\n%s", diff)
	}
	if diff := cmp.Diff(example(t), p); diff != "" {
		t.Errorf("the patched policy was touched (-want +got)\n%s", diff)
	}

	// The same again changes nothing.
	again, changed, err := policy.Patch(next, []byte(`{"shadow_mode": true, "routes": {"fast": {"capacity": 7, "shadow_mode": false}, "cost": {}}}`))
	if err != nil || len(changed) != 0 {
		t.Errorf("a no-op changed %v, error %v", changed, err)
	}
	if diff := cmp.Diff(next, again); diff != "" {
		t.Errorf("a no-op (-before +after)\n%s", diff)
	}
}

func TestPatchRefuses(t *testing.T) {
	t.Parallel()
	p := mustParse(t, base+`
routes:
  tb: {path: /tb, upstream: u, capacity: 5, refill_rate: 1}
  none: {path: /none, upstream: u}
`)
	for name, c := range map[string]struct{ patch, path, problem string }{
		"empty":            {"", "", "empty"},
		"list":             {"[]", "", "must be a mapping"},
		"yaml":             {"shadow_mode: true", "", "not valid JSON"},
		"unknown key":      {`{"upstreams": {}}`, "upstreams", "unknown key; the keys here are algorithm, routes, shadow_mode"},
		"unknown field":    {`{"routes": {"tb": {"path": "/x"}}}`, "routes.tb.path", "unknown key"},
		"unknown route":    {`{"routes": {"nope": {"capacity": 1}}}`, "routes.nope", "no such route; the routes are none, tb"},
		"bad name":         {`{"routes": {"a.b": {}}}`, `routes."a.b"`, "a-z"},
		"duplicate":        {`{"shadow_mode": true, "shadow_mode": true}`, "shadow_mode", "there twice"},
		"null":             {`{"routes": {"tb": {"shadow_mode": null}}}`, "routes.tb.shadow_mode", "no value"},
		"zero":             {`{"routes": {"tb": {"capacity": 0}}}`, "routes.tb.capacity", "set deny: true"},
		"1e309":            {`{"routes": {"tb": {"refill_rate": 1e309}}}`, "routes.tb.refill_rate", "a number from"},
		"NaN":              {`{"routes": {"tb": {"refill_rate": NaN}}}`, "routes.tb.refill_rate", "not valid JSON"},
		"NaN text":         {`{"routes": {"tb": {"refill_rate": "NaN"}}}`, "routes.tb.refill_rate", "must be a number"},
		"leaves no limit":  {`{"algorithm": "sliding_window"}`, "routes.tb.sliding_limit", "algorithm in force"},
		"half a quota":     {`{"routes": {"none": {"capacity": 5}}}`, "routes.none.refill_rate", "must be set"},
		"one bad of three": {`{"shadow_mode": true, "routes": {"tb": {"capacity": 9}, "none": {"refill_rate": -1}}}`, "routes.none.refill_rate", "not -1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			next, changed, err := policy.Patch(p, []byte(c.patch))
			wantProblem(t, err, c.path, c.problem)
			if len(changed) != 0 || !cmp.Equal(next, policy.Policy{}) {
				t.Errorf("a refused patch gave %+v, changed %v", next, changed)
			}
		})
	}
}

func TestPatchNamesLines(t *testing.T) {
	t.Parallel()
	_, _, err := policy.Patch(example(t), []byte("{\"routes\": {\n \"fast\": {\n  \"capacity\": 3,\n  \"bogus\": 1}}}"))
	if errs := errorsOf(t, err); errs[0].Line != 4 {
		t.Errorf("got %v, want line 4", err)
	}
	_, _, err = policy.Patch(example(t), []byte("{\"routes\": {\n \"gone\": {}}}"))
	if errs := errorsOf(t, err); errs[0].Line != 2 || !strings.Contains(err.Error(), "(line 2)") {
		t.Errorf("got %v, want line 2", err)
	}
}

// Two administrators who change different things lose nothing, in either order.
func TestPatchesOfDifferentFieldsCommute(t *testing.T) {
	t.Parallel()
	patches := []string{
		`{"shadow_mode": true}`, `{"algorithm": "sliding_window"}`,
		`{"routes": {"fast": {"capacity": 3}}}`, `{"routes": {"fast": {"sliding_limit": 4}}}`, `{"routes": {"cost": {"shadow_mode": true}}}`,
	}
	apply := func(p policy.Policy, patch string) policy.Policy {
		next, _, err := policy.Patch(p, []byte(patch))
		if err != nil {
			t.Fatal(err)
		}
		return next
	}
	for i, a := range patches {
		for _, b := range patches[i+1:] {
			ab := apply(apply(example(t), a), b)
			ba := apply(apply(example(t), b), a)
			if diff := cmp.Diff(ab, ba); diff != "" {
				t.Error(fmt.Sprintf("%s and %s do not commute\n", a, b) + diff)
			}
		}
	}
}

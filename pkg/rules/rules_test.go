package rules_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/pkg/rules"
)

var now = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func TestNames(t *testing.T) {
	t.Parallel()
	keys := map[string]string{}
	for _, name := range []string{"ann", "a_b-9", "ip:192.0.2.7", "ip:2001:db8::/64", "ip:2001:db8::1", "ip:::1", "ip:10.0.0.0/8"} {
		if err := rules.ValidateName(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		key := rules.UserKey(name)
		if other, taken := keys[key]; taken || strings.Count(key, ".") != 1 {
			t.Errorf("%s is kept under %s, as %s is", name, key, other)
		}
		keys[key] = name
		data, err := rules.EncodeUser(rules.User{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		if r, err := rules.Decode(key, data); err != nil || r.User.Name != name {
			t.Errorf("%s: %+v, %v", key, r, err)
		}
		if r, err := rules.Decode(key, nil); err != nil || !r.Gone || r.Name != name {
			t.Errorf("%s gone: %+v, %v", key, r, err)
		}
		if back, err := rules.NameOf(rules.ClientID(name)); err != nil || back != name {
			t.Errorf("%s: its client id means %q, %v", name, back, err)
		}
	}
	for _, name := range []string{"", "Ann", "a.b", "a>", "user:ann", "ip:", "ip:192.0.2.007", "ip:::ffff:1.2.3.4", "ip:2001:db8::1/64", "ip:fe80::1%eth0", strings.Repeat("x", 65)} {
		if rules.ValidateName(name) == nil {
			t.Errorf("%q is taken for a name", name)
		}
	}
}

func TestRulesEndInTime(t *testing.T) {
	t.Parallel()
	u := rules.User{Name: "ann", Plan: "free"}
	forever := policy.Override{Route: "a", Quota: policy.Quota{Capacity: 1, RefillRate: 1}}
	hour := policy.Override{Route: "b", Quota: policy.Quota{Capacity: 2, RefillRate: 1}, Expires: now.Add(time.Hour)}
	u.SetOverride(hour)
	u.SetOverride(forever)
	u.Block = &rules.Block{Until: now.Add(time.Minute)}
	for _, tc := range []struct {
		at      time.Duration
		blocked bool
		routes  string
		until   time.Duration // 0: for ever
	}{
		{0, true, "a b", time.Minute}, {time.Minute - 1, true, "a b", time.Minute}, {time.Minute, false, "a b", time.Hour},
		{time.Hour - 1, false, "a b", time.Hour}, {time.Hour, false, "a", 0},
	} {
		r, until := u.Rules(now.Add(tc.at))
		var routes []string
		for _, o := range *r.Overrides {
			routes = append(routes, o.Route)
		}
		var want time.Time
		if tc.until > 0 {
			want = now.Add(tc.until)
		}
		if r.Blocked != tc.blocked || strings.Join(routes, " ") != tc.routes || !until.Equal(want) {
			t.Errorf("after %v: blocked %v, overrides %v, until %v", tc.at, r.Blocked, routes, until)
		}
	}
	if len(u.Overrides) != 2 || u.Block == nil {
		t.Error("Rules changed the user")
	}
	if r, _ := (rules.User{Name: "ip:192.0.2.7", Block: &rules.Block{}}).Rules(now); r.Name != "" || !r.Blocked {
		t.Errorf("an address is no user, and blocked until that is lifted: %+v", r)
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	secret, k := rules.NewKey("laptop", now.Add(time.Hour), now)
	other, _ := rules.NewKey("", time.Time{}, now)
	if secret == other || len(secret) < 26 || strings.Contains(k.Hash, secret) || k.Hash != rules.HashOf(secret) {
		t.Fatalf("a poor key: %s, %+v", secret, k)
	}
	u := rules.User{Name: "ann"}
	u.AddKey(k)
	k.Label = "desk"
	u.AddKey(k)
	if len(u.Keys) != 1 || u.Keys[0].Label != "desk" {
		t.Errorf("%+v", u.Keys)
	}
	if !u.HasKey(k.Hash, now) || u.HasKey(k.Hash, now.Add(time.Hour)) || u.HasKey(rules.HashOf(other), now) {
		t.Error("a key is the user's until it expires")
	}
	if !u.DropKey(k.ID()) || u.DropKey(k.ID()) || len(u.Keys) != 0 {
		t.Error("a key can be dropped once")
	}
}

// TestDecodeRefuses: edges are shown these bytes by whoever can write to the bucket.
func TestDecodeRefuses(t *testing.T) {
	t.Parallel()
	good, err := rules.EncodePlan(rules.Plan{Name: "gold", Plan: policy.Plan{Rate: 1, Burst: 2}})
	if err != nil {
		t.Fatal(err)
	}
	r, err := rules.Decode("plan.gold", good)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(&rules.Plan{Name: "gold", Plan: policy.Plan{Rate: 1, Burst: 2}}, r.Plan); d != "" {
		t.Error(d)
	}
	hash := rules.HashOf("k")
	if r, err := rules.Decode("key."+hash, []byte(`{"user":"ann"}`)); err != nil || r.Owner != "ann" || r.Hash != hash {
		t.Errorf("%+v, %v", r, err)
	}
	for _, tc := range [][2]string{
		{"plan.gold", `{"name":"lead","rate":1,"burst":1}`}, {"plan.gold", `{"name":"gold","rate":-1,"burst":1}`}, {"plan.gold", `{"name":"gold","rate":1}`},
		{"user.ann", `{"name":"bea"}`}, {"user.ann", `{`}, {"user.ann", `[]`}, {"user.ann", `{"name":"ann","keys":[{"hash":"k"}]}`},
		{"address.192_0_2_7", `{"name":"ip:192.0.2.7","plan":"free"}`}, {"address.192_0_2_7", `{"name":"ann"}`},
		{"key." + hash, `{"user":"A"}`}, {"other.x", `{}`}, {"x", `{}`},
	} {
		if _, err := rules.Decode(tc[0], []byte(tc[1])); !errors.Is(err, rules.ErrMalformed) {
			t.Errorf("%s: %s: got %v", tc[0], tc[1], err)
		}
	}
}

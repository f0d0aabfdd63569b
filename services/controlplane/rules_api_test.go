package controlplane

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/rules"
)

func TestUsersKeysPlans(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	ann := ok[rules.User](t, p, "POST", "/api/users", `{"name":"ann","plan":"free"}`, "X-Admin-Actor", "bea", "X-Admin-Reason", "new customer")
	if ann.Plan != "free" || ann.Created.IsZero() {
		t.Errorf("%+v", ann)
	}
	refused(t, p, 409, "taken", "POST", "/api/users", `{"name":"ann"}`)
	refused(t, p, 409, "user of the policy", "POST", "/api/users", `{"name":"demo-free"}`)
	refused(t, p, 400, "plan: there is no plan", "POST", "/api/users", `{"name":"bea","plan":"lead"}`)
	refused(t, p, 400, "name", "POST", "/api/users", `{"name":"Bea"}`)
	refused(t, p, 400, "name", "POST", "/api/users", `{}`)
	refused(t, p, 400, "plann (line 1): unknown key", "POST", "/api/users", `{"name":"bea","plann":"free"}`)
	if u := ok[rules.User](t, p, "PATCH", "/api/users/ann", `{"plan":"growth","admin":true}`); u.Plan != "growth" || !u.Admin {
		t.Errorf("%+v", u)
	}
	refused(t, p, 404, "no such user", "PATCH", "/api/users/nobody", `{"plan":"growth"}`)
	refused(t, p, 400, "can't be changed", "PATCH", "/api/users/ann", `{"name":"other"}`)

	// A key is shown once.
	k := ok[keyReply](t, p, "POST", "/api/users/ann/keys", `{"label":"laptop"}`)
	if !strings.HasPrefix(k.Key, "ak_") || k.Hash != rules.HashOf(k.Key) || !strings.HasPrefix(k.Hash, k.ID) {
		t.Errorf("%+v", k)
	}
	if a := p.do(t, "GET", "/api/users/ann", ""); strings.Contains(a.body, k.Key) || !strings.Contains(a.body, k.Hash) {
		t.Errorf("the user shows %s", a.body)
	}
	if strings.Contains(p.log.String(), k.Key) {
		t.Error("the key is in the log")
	}
	own := ok[keyReply](t, p, "POST", "/api/users/ann/keys", `{"hash":"`+strings.ToUpper(rules.HashOf("elsewhere"))+`","expires":"2099-01-01T00:00:00Z"}`)
	if own.Key != "" || own.Expires.Year() != 2099 {
		t.Errorf("%+v", own)
	}
	refused(t, p, 400, "hash", "POST", "/api/users/ann/keys", `{"hash":"short"}`)
	refused(t, p, 400, "past", "POST", "/api/users/ann/keys", `{"expires":"2001-01-01T00:00:00Z"}`)
	refused(t, p, 409, "demo-free", "POST", "/api/users/ann/keys", `{"hash":"`+rules.HashOf("demo-free")+`"}`)
	ok[any](t, p, "DELETE", "/api/users/ann/keys/"+own.ID, "")
	refused(t, p, 404, "no key", "DELETE", "/api/users/ann/keys/"+own.ID, "")

	u := ok[rules.User](t, p, "PUT", "/api/users/ann/overrides/fast", `{"capacity":500,"refill_rate":50,"expires":"2099-01-01T00:00:00Z"}`)
	if len(u.Overrides) != 1 || u.Overrides[0].Capacity != 500 {
		t.Errorf("%+v", u)
	}
	if u = ok[rules.User](t, p, "PUT", "/api/users/ann/overrides/*", `{"rate":5,"burst":10}`); len(u.Overrides) != 2 {
		t.Errorf("%+v", u)
	}
	refused(t, p, 400, "no route nowhere", "PUT", "/api/users/ann/overrides/nowhere", `{"capacity":5,"refill_rate":1}`)
	refused(t, p, 400, "capacity", "PUT", "/api/users/ann/overrides/fast", `{"capacity":0,"refill_rate":1}`)
	ok[any](t, p, "DELETE", "/api/users/ann/overrides/*", "")
	refused(t, p, 404, "no override", "DELETE", "/api/users/ann/overrides/*", "")

	// Plans of the rules go before the policy's.
	ok[planInfo](t, p, "PUT", "/api/plans/gold", `{"rate":7,"burst":9}`)
	ok[planInfo](t, p, "PUT", "/api/plans/free", `{"rate":1,"burst":2,"daily_quota":3}`)
	refused(t, p, 400, "plans.gold.burst", "PUT", "/api/plans/gold", `{"rate":7}`)
	sources := map[string]string{}
	for _, pl := range ok[plansReply](t, p, "GET", "/api/plans", "").Plans {
		sources[pl.Name] = pl.Source
	}
	if sources["gold"] != "rules" || sources["free"] != "rules" || sources["growth"] != "policy" {
		t.Errorf("%v", sources)
	}
	ok[rules.User](t, p, "PATCH", "/api/users/ann", `{"plan":"gold"}`)
	refused(t, p, 409, "users have this plan", "DELETE", "/api/plans/gold", "")
	ok[any](t, p, "DELETE", "/api/users/ann", "")
	ok[any](t, p, "DELETE", "/api/plans/gold", "")
	refused(t, p, 404, "no such", "GET", "/api/users/ann", "")

	// Names that are patterns, or no names: nobody's, and no store is asked for them.
	ok[rules.User](t, p, "POST", "/api/users", `{"name":"bea"}`)
	for _, name := range []string{"*", "%3E", "..%2Fbea", "b%20a", "bea%00", "Bea", "ip:*"} {
		refused(t, p, 400, "name", "GET", "/api/users/"+name, "")
		refused(t, p, 400, "name", "PATCH", "/api/users/"+name, `{"admin":true}`)
		refused(t, p, 400, "name", "POST", "/api/users/"+name+"/keys", `{}`)
		refused(t, p, 400, "name", "DELETE", "/api/users/"+name, "")
		refused(t, p, 400, "plan", "DELETE", "/api/plans/"+name, "")
		refused(t, p, 400, "after", "GET", "/api/users?after="+name, "")
		refused(t, p, 400, "plan", "GET", "/api/users?plan="+name, "")
	}
	ok[any](t, p, "DELETE", "/api/users/bea", "")

	for i := range 5 {
		ok[rules.User](t, p, "POST", "/api/users", fmt.Sprintf(`{"name":"u%d"}`, i))
	}
	first := ok[usersReply](t, p, "GET", "/api/users?limit=3", "")
	rest := ok[usersReply](t, p, "GET", "/api/users?limit=3&after="+first.Next, "")
	if len(first.Users) != 3 || first.Next != "u2" || len(rest.Users) != 2 || rest.Next != "" {
		t.Errorf("%+v, %+v", first, rest)
	}

	// Each change is in the audit log, with who and why, and no key.
	b := server.Bus(t)
	bustest.Await(t, "the audit log", func() bool {
		var actions []string
		for _, a := range stored(t, b, events.StreamAudit, events.Decode[events.Audit]) {
			actions = append(actions, a.Action+" "+a.Target+" "+a.Result+" "+a.Actor+" "+a.Reason)
			if strings.Contains(a.Detail, k.Key) {
				t.Fatal("the key is in the audit log")
			}
		}
		text := strings.Join(actions, "\n")
		for _, want := range []string{
			"user.create user:ann ok bea new customer", "user.create user:ann conflict", "key.create user:ann ok", "key.delete user:ann ok",
			"override.put user:ann ok", "plan.put plan:gold ok", "plan.delete plan:gold conflict", "user.delete user:ann ok",
		} {
			if !strings.Contains(text, want) {
				return false
			}
		}
		return true
	})
}

func TestClientOperations(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	buckets := memstore.New(nil)
	b := server.Bus(t)
	file := examplePolicy(t)
	p := newPlaneOn(t, server.Bus(t), buckets, func(c *Config) { c.PolicyFile = file })
	p.awaitReady(t)
	changed := make(chan events.ChangedBucket, 100)
	sub, err := b.Subscribe(events.AllChanged, func(m bus.Message) {
		e, err := events.Decode[events.BucketsChanged](m.Data)
		if err != nil || m.Subject != events.SubjectChanged(store.ShardOf(e.Buckets[0].Client)) {
			t.Errorf("%s %s", m.Subject, m.Data)
			return
		}
		changed <- e.Buckets[0]
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sub.Stop)
	told := func(want events.ChangedBucket) {
		t.Helper()
		select {
		case got := <-changed:
			if got != want {
				t.Errorf("edges were told of %+v, want %+v", got, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("edges were not told of %+v", want)
		}
	}
	ok[rules.User](t, p, "POST", "/api/users", `{"name":"ann","plan":"free"}`)
	spend := func(client, scope string, tokens int64) {
		t.Helper()
		c := ok[clientReply](t, p, "GET", "/api/clients/"+strings.ReplaceAll(client, "/", "%2F"), "")
		for _, x := range c.Balances {
			if x.Scope == scope {
				spec := bucket.Effective(bucket.Limit{Kind: bucket.Kind(x.Algorithm), Capacity: int64(x.Capacity), Rate: int64(x.Rate * bucket.One), Grace: scope == "fast"}, bucket.One)
				if _, err := buckets.Check(t.Context(), store.Check{Client: client, Limits: []store.Limit{{Scope: scope, Spec: spec}}, Cost: tokens * bucket.One}); err != nil {
					t.Fatal(err)
				}
				return
			}
		}
		t.Fatalf("%s has no %s: %+v", client, scope, c)
	}
	remaining := func(c clientReply, scope string) float64 {
		for _, x := range c.Balances {
			if x.Scope == scope {
				return x.Remaining
			}
		}
		t.Fatalf("no %s in %+v", scope, c)
		return 0
	}
	capacity := func(c clientReply, scope string) float64 {
		i := slices.IndexFunc(c.Balances, func(b balance) bool { return b.Scope == scope })
		return c.Balances[max(0, i)].Capacity
	}
	c := ok[clientReply](t, p, "GET", "/api/clients/user:ann", "")
	if c.Client != "user:ann" || c.Plan != "free" || len(c.Balances) != 7 || remaining(c, "fast") != 20 || remaining(c, bucket.ScopeDay) != 10_000 {
		t.Errorf("%+v", c)
	}
	spend("user:ann", bucket.ScopeDay, 100)
	spend("user:ann", "fast", 20)
	if c = ok[clientReply](t, p, "GET", "/api/clients/user:ann", ""); remaining(c, bucket.ScopeDay) != 9_900 {
		t.Errorf("%+v", c)
	}
	if c = ok[clientReply](t, p, "POST", "/api/clients/user:ann/grant", `{"scope":"@day","tokens":40}`, "X-Admin-Reason", "our fault"); remaining(c, bucket.ScopeDay) != 9_940 || len(c.Balances) != 1 {
		t.Errorf("%+v", c)
	}
	told(events.ChangedBucket{Client: "user:ann", Scope: bucket.ScopeDay})
	if c = ok[clientReply](t, p, "POST", "/api/clients/user:ann/reset", `{}`); remaining(c, bucket.ScopeDay) != 10_000 || remaining(c, "fast") != 20 {
		t.Errorf("%+v", c)
	}
	told(events.ChangedBucket{Client: "user:ann"})
	refused(t, p, 400, "scope", "POST", "/api/clients/user:ann/reset", `{"scope":"nowhere"}`)
	refused(t, p, 400, "tokens", "POST", "/api/clients/user:ann/grant", `{"tokens":-1}`)
	refused(t, p, 400, "tokens", "POST", "/api/clients/user:ann/grant", `{"tokens":1e309}`)
	refused(t, p, 404, "no user nobody", "GET", "/api/clients/user:nobody", "")
	refused(t, p, 400, "a client is", "GET", "/api/clients/ip:nonsense", "")

	u := ok[rules.User](t, p, "POST", "/api/clients/user:ann/raise", `{"route":"fast","capacity":500,"refill_rate":50,"seconds":3600}`)
	if len(u.Overrides) != 1 || time.Until(u.Overrides[0].Expires) > time.Hour || time.Until(u.Overrides[0].Expires) < 50*time.Minute {
		t.Errorf("%+v", u)
	}
	told(events.ChangedBucket{Client: "user:ann"})
	// The limit is another, and the balance is not filled up by that.
	if c = ok[clientReply](t, p, "GET", "/api/clients/user:ann", ""); capacity(c, "fast") != 500 || remaining(c, "fast") > 400 {
		t.Errorf("%+v", c)
	}
	refused(t, p, 400, "seconds", "POST", "/api/clients/user:ann/raise", `{"route":"fast","capacity":500,"refill_rate":50}`)
	refused(t, p, 400, "seconds", "POST", "/api/clients/user:ann/raise", `{"route":"fast","capacity":500,"refill_rate":50,"seconds":-1}`)
	// What holds for good must not be lost to what ends.
	ok[rules.User](t, p, "PUT", "/api/users/ann/overrides/slow", `{"capacity":30,"refill_rate":3}`)
	refused(t, p, 409, "for good", "POST", "/api/clients/user:ann/raise", `{"route":"slow","capacity":500,"refill_rate":50,"seconds":3600}`)
	ok[rules.User](t, p, "DELETE", "/api/users/ann/overrides/slow", "")

	u = ok[rules.User](t, p, "POST", "/api/clients/user:ann/block", `{"reason":"abuse"}`)
	if u.Block == nil || u.Block.Reason != "abuse" {
		t.Errorf("%+v", u)
	}
	told(events.ChangedBucket{Client: "user:ann"})
	if c = ok[clientReply](t, p, "GET", "/api/clients/user:ann", ""); !c.Blocked {
		t.Errorf("%+v", c)
	}
	if u = ok[rules.User](t, p, "POST", "/api/clients/user:ann/unblock", "{}"); u.Block != nil {
		t.Errorf("%+v", u)
	}
	told(events.ChangedBucket{Client: "user:ann"})

	// Addresses: made when first needed, gone when nothing is left.
	for _, address := range []string{"ip:192.0.2.7", "ip:2001:db8::%2F64"} {
		ok[rules.User](t, p, "POST", "/api/clients/"+address+"/block", `{"seconds":60}`)
		if c = ok[clientReply](t, p, "GET", "/api/clients/"+address, ""); !c.Blocked || c.Rules == nil {
			t.Errorf("%+v", c)
		}
		ok[rules.User](t, p, "POST", "/api/clients/"+address+"/raise", `{"route":"fast","capacity":30,"refill_rate":5,"seconds":60}`)
		if c = ok[clientReply](t, p, "GET", "/api/clients/"+address, ""); remaining(c, "fast") != 30 {
			t.Errorf("%+v", c)
		}
		if l := ok[usersReply](t, p, "GET", "/api/users?addresses=true", ""); len(l.Users) != 1 {
			t.Errorf("%+v", l)
		}
		ok[any](t, p, "DELETE", "/api/users/"+address+"/overrides/fast", "")
		ok[rules.User](t, p, "POST", "/api/clients/"+address+"/unblock", "{}")
		if l := ok[usersReply](t, p, "GET", "/api/users?addresses=true", ""); len(l.Users) != 0 {
			t.Errorf("%+v", l)
		}
	}
	spend("ip:192.0.2.8", "fast", 5)
	if c = ok[clientReply](t, p, "POST", "/api/clients/ip:192.0.2.8/reset", `{"scope":"fast"}`); remaining(c, "fast") != 20 {
		t.Errorf("%+v", c)
	}
	refused(t, p, 409, "user of the policy", "POST", "/api/clients/user:demo-free/block", "{}")
	if c = ok[clientReply](t, p, "POST", "/api/clients/user:demo-free/reset", "{}"); c.Plan != "free" {
		t.Errorf("%+v", c)
	}
	bustest.Await(t, "the audit log", func() bool {
		text := ""
		for _, a := range stored(t, b, events.StreamAudit, events.Decode[events.Audit]) {
			text += a.Action + " " + a.Target + " " + a.Result + " " + a.Reason + "\n"
		}
		for _, want := range []string{"client.grant user:ann ok our fault", "client.reset user:ann ok", "client.raise user:ann ok", "client.block user:ann ok abuse", "client.unblock user:ann ok", "client.block ip:2001:db8::/64 ok"} {
			if !strings.Contains(text, want) {
				return false
			}
		}
		return true
	})
}

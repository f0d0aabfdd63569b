// Package rulestest is the conformance suite of rulestore.Store.
package rulestest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/pkg/rules"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore"
)

// Run holds a store, whose Run is running, to the documentation of rulestore.Store. b reaches the bucket that it
// publishes to; other is a second store on the same rules, as another replica has one.
func Run(t *testing.T, s, other rulestore.Store, b *bus.Bus) {
	bustest.Await(t, "the store is ready", func() bool {
		_, err := s.Users(t.Context(), rulestore.Query{Limit: 1})
		_, err2 := other.Users(t.Context(), rulestore.Query{Limit: 1})
		return err == nil && err2 == nil
	})
	suite := suite{s, other, b}
	for name, test := range map[string]func(*testing.T){
		"users": suite.users, "keys": suite.keys, "overrides and blocks": suite.overrides, "pages": suite.pages,
		"plans": suite.plans, "addresses": suite.addresses, "concurrent writers": suite.concurrent, "bucket": suite.bucket,
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); test(t) })
	}
}

type suite struct {
	s, other rulestore.Store
	b        *bus.Bus
}

func key(name string) rules.Key {
	return rules.Key{Hash: rules.HashOf(name), Label: name, Created: rulestore.Now()}
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func wantErr(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}

func same(t testing.TB, what string, got, want rules.User) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got)\n%s", what, d)
	}
}

func (x suite) users(t *testing.T) {
	ctx := t.Context()
	_, err := x.s.User(ctx, "u-nobody")
	wantErr(t, "a user that is not there", err, rulestore.ErrNotFound)
	ann := must(x.s.Create(ctx, rules.User{Name: "u-ann", Plan: "free", Admin: true}))(t)
	if ann.Created.IsZero() || !ann.Updated.Equal(ann.Created) {
		t.Errorf("created %v, updated %v", ann.Created, ann.Updated)
	}
	same(t, "as created", must(x.s.User(ctx, "u-ann"))(t), ann)
	_, err = x.s.Create(ctx, rules.User{Name: "u-ann"})
	wantErr(t, "the name again", err, rulestore.ErrExists)
	same(t, "after that", must(x.s.User(ctx, "u-ann"))(t), ann)

	changed := must(x.s.Update(ctx, "u-ann", func(u *rules.User) error { u.Plan, u.Admin = "", false; return nil }))(t)
	if changed.Plan != "" || changed.Admin || !changed.Created.Equal(ann.Created) || changed.Updated.Before(ann.Updated) {
		t.Errorf("%+v", changed)
	}
	same(t, "as changed", must(x.s.User(ctx, "u-ann"))(t), changed)
	refused := errors.New("no")
	_, err = x.s.Update(ctx, "u-ann", func(u *rules.User) error { u.Plan = "growth"; return refused })
	wantErr(t, "a change that refuses", err, refused)
	same(t, "after a change that refuses", must(x.s.User(ctx, "u-ann"))(t), changed)
	_, err = x.s.Update(ctx, "u-nobody", func(*rules.User) error { return nil })
	wantErr(t, "a change of nobody", err, rulestore.ErrNotFound)

	if err := x.s.Delete(ctx, "u-ann"); err != nil {
		t.Fatal(err)
	}
	_, err = x.s.User(ctx, "u-ann")
	wantErr(t, "a user that was deleted", err, rulestore.ErrNotFound)
	wantErr(t, "deleted again", x.s.Delete(ctx, "u-ann"), rulestore.ErrNotFound)
	again := must(x.s.Create(ctx, rules.User{Name: "u-ann"}))(t)
	same(t, "made again", must(x.s.User(ctx, "u-ann"))(t), again)
}

func (x suite) keys(t *testing.T) {
	ctx := t.Context()
	expiring := key("k-1")
	expiring.Expires = rulestore.Now().Add(time.Hour)
	ann := rules.User{Name: "k-ann"}
	ann.AddKey(expiring)
	ann.AddKey(key("k-2"))
	ann = must(x.s.Create(ctx, ann))(t)
	same(t, "with keys", must(x.s.User(ctx, "k-ann"))(t), ann)
	same(t, "by key", must(x.s.UserByKey(ctx, rules.HashOf("k-2")))(t), ann)
	_, err := x.s.UserByKey(ctx, rules.HashOf("k-none"))
	wantErr(t, "a key of nobody", err, rulestore.ErrNotFound)
	_, err = x.s.UserByKey(ctx, "no hash")
	wantErr(t, "no key at all", err, rulestore.ErrNotFound)

	bea := rules.User{Name: "k-bea"}
	bea.AddKey(key("k-2"))
	_, err = x.s.Create(ctx, bea)
	wantErr(t, "a key of somebody else", err, rulestore.ErrExists)
	_, err = x.s.User(ctx, "k-bea")
	wantErr(t, "after that", err, rulestore.ErrNotFound)
	must(x.s.Create(ctx, rules.User{Name: "k-bea"}))(t)
	_, err = x.s.Update(ctx, "k-bea", func(u *rules.User) error { u.AddKey(key("k-2")); return nil })
	wantErr(t, "a key of somebody else, later", err, rulestore.ErrExists)

	must(x.s.Update(ctx, "k-ann", func(u *rules.User) error { u.DropKey(key("k-2").ID()); return nil }))(t)
	_, err = x.s.UserByKey(ctx, rules.HashOf("k-2"))
	wantErr(t, "a key that was withdrawn", err, rulestore.ErrNotFound)
	must(x.s.Update(ctx, "k-bea", func(u *rules.User) error { u.AddKey(key("k-2")); return nil }))(t)
	if u := must(x.s.UserByKey(ctx, rules.HashOf("k-2")))(t); u.Name != "k-bea" {
		t.Errorf("the key is %s's", u.Name)
	}
	if err := x.s.Delete(ctx, "k-ann"); err != nil {
		t.Fatal(err)
	}
	_, err = x.s.UserByKey(ctx, rules.HashOf("k-1"))
	wantErr(t, "a key of a user that was deleted", err, rulestore.ErrNotFound)
}

func (x suite) overrides(t *testing.T) {
	ctx := t.Context()
	must(x.s.Create(ctx, rules.User{Name: "o-ann"}))(t)
	u := must(x.s.Update(ctx, "o-ann", func(u *rules.User) error {
		u.SetOverride(policy.Override{Route: "fast", Quota: policy.Quota{Capacity: 7, RefillRate: 0.25, MaxDebt: 3}, Expires: rulestore.Now().Add(time.Hour)})
		u.SetOverride(policy.Override{Plan: policy.Plan{Rate: 1.5, Burst: 3, DailyQuota: 9}})
		u.Block = &rules.Block{Until: rulestore.Now().Add(time.Minute), Reason: `so "it" goes`}
		return nil
	}))(t)
	if len(u.Overrides) != 2 {
		t.Fatalf("%+v", u)
	}
	same(t, "with overrides", must(x.s.User(ctx, "o-ann"))(t), u)
	u = must(x.s.Update(ctx, "o-ann", func(u *rules.User) error { u.DropOverride("fast"); u.Block = nil; return nil }))(t)
	if len(u.Overrides) != 1 || u.Block != nil {
		t.Errorf("%+v", u)
	}
	same(t, "without", must(x.s.User(ctx, "o-ann"))(t), u)
}

func (x suite) pages(t *testing.T) {
	ctx := t.Context()
	var want []string
	for i := range 25 {
		name := fmt.Sprintf("p-%03d", i)
		plan := "pageplan"
		if i%2 == 1 {
			plan = ""
		} else {
			want = append(want, name)
		}
		must(x.s.Create(ctx, rules.User{Name: name, Plan: plan}))(t)
	}
	var got []string
	pages := 0
	for after := ""; ; pages++ {
		page := must(x.s.Users(ctx, rulestore.Query{After: after, Limit: 4, Plan: "pageplan"}))(t)
		if len(page) == 0 {
			break
		}
		for _, u := range page {
			got = append(got, u.Name)
		}
		after = got[len(got)-1]
	}
	if d := cmp.Diff(want, got); d != "" || pages != 4 {
		t.Errorf("%d pages (-want +got)\n%s", pages, d)
	}
	page := must(x.s.Users(ctx, rulestore.Query{After: "p-003", Limit: 3}))(t)
	if len(page) != 3 || page[0].Name != "p-004" || page[2].Name != "p-006" {
		t.Errorf("%+v", page)
	}
}

func (x suite) plans(t *testing.T) {
	ctx := t.Context()
	gold := rules.Plan{Name: "l-gold", Plan: policy.Plan{Rate: 2.5, Burst: 10, DailyQuota: 1000}}
	if err := x.s.PutPlan(ctx, gold); err != nil {
		t.Fatal(err)
	}
	gold.Burst = 20
	if err := x.s.PutPlan(ctx, gold); err != nil {
		t.Fatal(err)
	}
	find := func() (found []rules.Plan) {
		for _, p := range must(x.s.Plans(ctx))(t) {
			if p.Name == gold.Name {
				found = append(found, p)
			}
		}
		return found
	}
	if d := cmp.Diff([]rules.Plan{gold}, find()); d != "" {
		t.Error(d)
	}
	must(x.s.Create(ctx, rules.User{Name: "l-ann", Plan: "l-gold"}))(t)
	wantErr(t, "a plan that a user has", x.s.DeletePlan(ctx, "l-gold"), rulestore.ErrInUse)
	if err := x.s.Delete(ctx, "l-ann"); err != nil {
		t.Fatal(err)
	}
	if err := x.s.DeletePlan(ctx, "l-gold"); err != nil {
		t.Fatal(err)
	}
	if p := find(); p != nil {
		t.Errorf("%+v", p)
	}
	wantErr(t, "a plan that is not there", x.s.DeletePlan(ctx, "l-gold"), rulestore.ErrNotFound)
}

func (x suite) addresses(t *testing.T) {
	ctx := t.Context()
	for _, name := range []string{"ip:192.0.2.7", "ip:2001:db8::/64"} {
		u := must(x.s.Create(ctx, rules.User{Name: name, Block: &rules.Block{Reason: "scraping"}}))(t)
		same(t, name, must(x.s.User(ctx, name))(t), u)
	}
	page := must(x.s.Users(ctx, rulestore.Query{Limit: 10, Addresses: true}))(t)
	if len(page) != 2 || page[0].Name != "ip:192.0.2.7" || page[1].Name != "ip:2001:db8::/64" {
		t.Errorf("%+v", page)
	}
	for _, u := range must(x.s.Users(ctx, rulestore.Query{Limit: rulestore.MaxPage}))(t) {
		if rules.IsAddress(u.Name) {
			t.Errorf("%s is among the users", u.Name)
		}
	}
}

// concurrent writers through two replicas lose nothing.
func (x suite) concurrent(t *testing.T) {
	ctx := t.Context()
	must(x.s.Create(ctx, rules.User{Name: "c-ann"}))(t)
	var wg sync.WaitGroup
	for i := range 12 {
		s := x.s
		if i%2 == 1 {
			s = x.other
		}
		wg.Go(func() {
			if _, err := s.Update(ctx, "c-ann", func(u *rules.User) error { u.AddKey(key("c-" + strconv.Itoa(i))); return nil }); err != nil {
				t.Errorf("writer %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if u := must(x.s.User(ctx, "c-ann"))(t); len(u.Keys) != 12 {
		t.Errorf("of 12 keys %d are there", len(u.Keys))
	}
	// One of two creators is told that the name is taken.
	var mu sync.Mutex
	made, refused := 0, 0
	for _, s := range []rulestore.Store{x.s, x.other, x.s, x.other} {
		wg.Go(func() {
			_, err := s.Create(ctx, rules.User{Name: "c-bea"})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				made++
			case errors.Is(err, rulestore.ErrExists):
				refused++
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if made != 1 || refused != 3 {
		t.Errorf("%d made, %d refused", made, refused)
	}
}

// bucket: every change is where edges look.
func (x suite) bucket(t *testing.T) {
	ctx := t.Context()
	get := func(key string) rules.Record {
		m, err := x.b.Get(ctx, events.StreamRules, events.SubjectRules(key))
		if err != nil {
			return rules.Record{Gone: true}
		}
		r, err := rules.Decode(key, m.Data)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	ann := rules.User{Name: "b-ann", Plan: "b-plan"}
	ann.AddKey(key("b-1"))
	ann.SetOverride(policy.Override{Route: "fast", Quota: policy.Quota{Capacity: 7, RefillRate: 1}})
	ann = must(x.s.Create(ctx, ann))(t)
	bustest.Await(t, "the user in the bucket", func() bool {
		r := get(rules.UserKey("b-ann"))
		return r.User != nil && cmp.Equal(*r.User, ann)
	})
	bustest.Await(t, "the key in the bucket", func() bool { return get(rules.HashKey(rules.HashOf("b-1"))).Owner == "b-ann" })
	if err := x.s.PutPlan(ctx, rules.Plan{Name: "b-plan", Plan: policy.Plan{Rate: 1, Burst: 1}}); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "the plan in the bucket", func() bool { p := get(rules.PlanKey("b-plan")).Plan; return p != nil && p.Burst == 1 })
	if err := x.s.Delete(ctx, "b-ann"); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "the user gone", func() bool { return get(rules.UserKey("b-ann")).Gone })
	bustest.Await(t, "the key gone", func() bool { return get(rules.HashKey(rules.HashOf("b-1"))).Gone })
}

// Running runs a store until the test ends.
func Running[S rulestore.Store](t testing.TB, s S) S {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(30 * time.Second):
			t.Error("the store does not stop")
		}
	})
	return s
}

package controlplane

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/pkg/rules"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore"
)

// anyRoute stands in a path for an override over all routes.
const anyRoute = "*"

const usersPage = 100

type usersReply struct {
	Users []rules.User `json:"users"`
	// Next is what "after" must be for the page after; "": there is none.
	Next string `json:"next,omitempty"`
}

func (s *Service) getUsers(c *call) (any, *problem) {
	limit, refusal := c.number("limit", usersPage)
	if refusal == nil && (limit < 1 || limit > rulestore.MaxPage) {
		refusal = refuse(http.StatusBadRequest, "limit must be 1 to %d", rulestore.MaxPage)
	}
	if refusal != nil {
		return nil, refusal
	}
	q := c.URL.Query()
	if after := q.Get("after"); after != "" && rules.ValidateName(after) != nil {
		return nil, refuse(http.StatusBadRequest, "after must be the next of the page before")
	}
	if plan := q.Get("plan"); plan != "" && !policy.ValidName(plan) {
		return nil, refuse(http.StatusBadRequest, "plan: %s", policy.NameProblem)
	}
	users, err := s.rules.Users(c.Context(), rulestore.Query{
		After: q.Get("after"), Limit: int(limit), Plan: q.Get("plan"), Addresses: q.Get("addresses") == "true",
	})
	if err != nil {
		return nil, failed(err)
	}
	reply := usersReply{Users: users}
	if reply.Users == nil {
		reply.Users = []rules.User{}
	}
	if len(users) == int(limit) {
		reply.Next = users[len(users)-1].Name
	}
	return reply, nil
}

func (s *Service) getUser(c *call) (any, *problem) {
	u, err := s.rules.User(c.Context(), c.param("user"))
	if err != nil {
		return nil, failed(err)
	}
	return u, nil
}

// userBody is what can be said of a user besides its keys and overrides; nil stays as it is.
type userBody struct {
	Name  *string `json:"name"`
	Plan  *string `json:"plan"`
	Admin *bool   `json:"admin"`
}

func (b userBody) apply(u *rules.User) {
	if b.Plan != nil {
		u.Plan = *b.Plan
	}
	if b.Admin != nil {
		u.Admin = *b.Admin
	}
}

func (s *Service) postUser(c *call) (any, *problem) {
	var body userBody
	if refusal := c.decode(&body); refusal != nil {
		return nil, refusal
	}
	if body.Name == nil {
		return nil, fieldProblem("name", "must be set")
	}
	u := rules.User{Name: *body.Name}
	c.target = rules.ClientID(u.Name)
	body.apply(&u)
	if refusal := s.checkUser(c.Context(), u); refusal != nil {
		return nil, refusal
	}
	u, err := s.rules.Create(c.Context(), u)
	if err != nil {
		return nil, failed(err)
	}
	c.status = http.StatusCreated
	return u, nil
}

func fieldProblem(path, what string) *problem {
	return invalid(policy.Errors{{Path: path, Problem: what}})
}

// checkUser holds a user against what there is in the policy.
func (s *Service) checkUser(ctx context.Context, u rules.User) *problem {
	if err := u.Validate(); err != nil {
		path, text, found := strings.Cut(err.Error(), ": ")
		if !found {
			path, text = "", err.Error()
		}
		return fieldProblem(path, text)
	}
	cur := s.versions.current()
	if cur == nil {
		return unavailable("no config is known yet, so plans can't be checked")
	}
	if _, taken := cur.policy.Users[u.Name]; taken {
		return refuse(http.StatusConflict, "%s is a user of the policy, and changed there", u.Name)
	}
	if u.Plan == "" {
		return nil
	}
	if _, known := cur.policy.Plans[u.Plan]; known {
		return nil
	}
	plans, err := s.rules.Plans(ctx)
	if err != nil {
		return failed(err)
	}
	for _, p := range plans {
		if p.Name == u.Plan {
			return nil
		}
	}
	return fieldProblem("plan", "there is no plan "+u.Plan)
}

// update changes the user that the path names, and tells edges of it.
func (s *Service) update(c *call, name string, change func(*rules.User) *problem) (rules.User, *problem) {
	c.target = rules.ClientID(name)
	u, err := s.rules.Update(c.Context(), name, func(u *rules.User) error {
		u.DropExpired(rulestore.Now())
		if refusal := change(u); refusal != nil {
			return refusal
		}
		if err := u.Validate(); err != nil {
			return fieldProblem("", err.Error())
		}
		return nil
	})
	if err != nil {
		return u, failed(err)
	}
	s.announce(rules.ClientID(name), "")
	return u, nil
}

func (s *Service) patchUser(c *call) (any, *problem) {
	var body userBody
	if refusal := c.decode(&body); refusal != nil {
		return nil, refusal
	}
	if body.Name != nil && *body.Name != c.param("user") {
		return nil, fieldProblem("name", "can't be changed: balances are kept under it")
	}
	u, refusal := s.update(c, c.param("user"), func(u *rules.User) *problem {
		body.apply(u)
		return s.checkUser(c.Context(), *u)
	})
	return reply(u, refusal)
}

// reply makes a refusal of a typed pair an untyped nothing.
func reply[T any](v T, refusal *problem) (any, *problem) {
	if refusal != nil {
		return nil, refusal
	}
	return v, nil
}

func (s *Service) deleteUser(c *call) (any, *problem) {
	c.target = rules.ClientID(c.param("user"))
	if err := s.rules.Delete(c.Context(), c.param("user")); err != nil {
		return nil, failed(err)
	}
	s.announce(c.target, "")
	c.status = http.StatusNoContent
	return nil, nil
}

// keyReply is a key that was just made: the only time that it is shown.
type keyReply struct {
	// ID is the beginning of the hash.
	ID string `json:"id"`
	// Key is the API key itself; "" where only its hash was given.
	Key     string    `json:"key,omitempty"`
	Hash    string    `json:"hash"`
	Label   string    `json:"label,omitempty"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires,omitzero"`
}

func (s *Service) postKey(c *call) (any, *problem) {
	var body struct {
		Label   string    `json:"label"`
		Expires time.Time `json:"expires"`
		// Hash takes over a key that was made elsewhere.
		Hash string `json:"hash"`
	}
	if refusal := c.decode(&body); refusal != nil {
		return nil, refusal
	}
	if !body.Expires.IsZero() && !body.Expires.After(time.Now()) {
		return nil, fieldProblem("expires", "is in the past")
	}
	secret, k := rules.NewKey(body.Label, body.Expires, rulestore.Now())
	if body.Hash != "" {
		secret, k.Hash = "", strings.ToLower(body.Hash)
	}
	if !rules.ValidHash(k.Hash) {
		return nil, fieldProblem("hash", "must be the SHA-256 of the key in 64 hexadecimal digits")
	}
	c.detail = "key " + k.ID()
	if refusal := s.keyIsFree(k.Hash); refusal != nil {
		return nil, refusal
	}
	if _, refusal := s.update(c, c.param("user"), func(u *rules.User) *problem { u.AddKey(k); return nil }); refusal != nil {
		return nil, refusal
	}
	c.status = http.StatusCreated
	return keyReply{k.ID(), secret, k.Hash, k.Label, k.Created, k.Expires}, nil
}

// keyIsFree looks whether a user of the policy has the key: edges would take it for that user's.
func (s *Service) keyIsFree(hash string) *problem {
	if cur := s.versions.current(); cur != nil {
		for name, u := range cur.policy.Users {
			if slices.Contains(u.KeyHashes, hash) {
				return refuse(http.StatusConflict, "the key is that of %s, a user of the policy", name)
			}
		}
	}
	return nil
}

func (s *Service) deleteKey(c *call) (any, *problem) {
	c.detail = "key " + c.param("key")
	_, refusal := s.update(c, c.param("user"), func(u *rules.User) *problem {
		if !u.DropKey(c.param("key")) {
			return refuse(http.StatusNotFound, "%s has no key %s", u.Name, c.param("key"))
		}
		return nil
	})
	c.status = http.StatusNoContent
	return nil, refusal
}

func (s *Service) putOverride(c *call) (any, *problem) {
	var o policy.Override
	if refusal := c.decode(&o); refusal != nil {
		return nil, refusal
	}
	if o.Route != "" && o.Route != c.param("route") {
		return nil, fieldProblem("route", "must be the path's")
	}
	if o.Route = c.param("route"); o.Route == anyRoute {
		o.Route = ""
	}
	c.detail = "route " + c.param("route")
	return reply(s.override(c, c.param("user"), o, func(*rules.User) *problem { return nil }))
}

// override gives a client an override, an address that has nothing yet too, where may has nothing against it.
func (s *Service) override(c *call, name string, o policy.Override, may func(*rules.User) *problem) (rules.User, *problem) {
	cur := s.versions.current()
	if cur == nil {
		return rules.User{}, unavailable("no config is known yet, so routes can't be checked")
	}
	if err := o.Validate(cur.policy, ""); err != nil {
		return rules.User{}, invalid(err)
	}
	if !o.Live(time.Now()) {
		return rules.User{}, fieldProblem("expires", "is in the past")
	}
	return s.updateOrCreate(c, name, func(u *rules.User) *problem {
		if refusal := may(u); refusal != nil {
			return refusal
		}
		u.SetOverride(o)
		return nil
	})
}

// updateOrCreate is update, and for an address it makes what is not there and removes what is empty.
func (s *Service) updateOrCreate(c *call, name string, change func(*rules.User) *problem) (rules.User, *problem) {
	c.target = rules.ClientID(name)
	if err := rules.ValidateName(name); err != nil {
		return rules.User{}, refuse(http.StatusBadRequest, "%v", err)
	}
	if cur := s.versions.current(); cur != nil {
		if _, taken := cur.policy.Users[name]; taken {
			return rules.User{}, refuse(http.StatusConflict, "%s is a user of the policy, and changed there", name)
		}
	}
	u, refusal := s.update(c, name, change)
	if !rules.IsAddress(name) {
		return u, refusal
	}
	switch {
	case refusal != nil && refusal.Status == http.StatusNotFound:
		u = rules.User{Name: name}
		if refusal := change(&u); refusal != nil {
			return u, refusal
		}
		if u.Empty() {
			return u, nil
		}
		var err error
		if u, err = s.rules.Create(c.Context(), u); errors.Is(err, rulestore.ErrExists) {
			return s.update(c, name, change)
		} else if err != nil {
			return u, failed(err)
		}
		s.announce(name, "")
		return u, nil
	case refusal == nil && u.Empty():
		if err := s.rules.Delete(c.Context(), name); err != nil && !errors.Is(err, rulestore.ErrNotFound) {
			return u, failed(err)
		}
	}
	return u, refusal
}

func (s *Service) deleteOverride(c *call) (any, *problem) {
	route := c.param("route")
	c.detail = "route " + route
	if route == anyRoute {
		route = ""
	}
	_, refusal := s.updateOrCreate(c, c.param("user"), func(u *rules.User) *problem {
		if !u.DropOverride(route) {
			return refuse(http.StatusNotFound, "%s has no override there", u.Name)
		}
		return nil
	})
	c.status = http.StatusNoContent
	return nil, refusal
}

// planInfo is a plan and where it comes from.
type planInfo struct {
	Name string `json:"name"`
	policy.Plan
	// Source is "rules" or "policy".
	Source string `json:"source"`
}

type plansReply struct {
	Plans []planInfo `json:"plans"`
}

// getPlans lists the plans in force: the policy's, and the rules', which go first.
func (s *Service) getPlans(c *call) (any, *problem) {
	cur := s.versions.current()
	if cur == nil {
		return nil, unavailable("no config is known yet")
	}
	own, err := s.rules.Plans(c.Context())
	if err != nil {
		return nil, failed(err)
	}
	all := map[string]planInfo{}
	for name, p := range cur.policy.Plans {
		all[name] = planInfo{name, p, "policy"}
	}
	for _, p := range own {
		all[p.Name] = planInfo{p.Name, p.Plan, "rules"}
	}
	reply := plansReply{Plans: []planInfo{}}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		reply.Plans = append(reply.Plans, all[name])
	}
	return reply, nil
}

func (s *Service) putPlan(c *call) (any, *problem) {
	var p policy.Plan
	if refusal := c.decode(&p); refusal != nil {
		return nil, refusal
	}
	c.target = "plan:" + c.param("plan")
	if err := policy.ValidatePlan(c.param("plan"), p); err != nil {
		return nil, invalid(err)
	}
	if err := s.rules.PutPlan(c.Context(), rules.Plan{Name: c.param("plan"), Plan: p}); err != nil {
		return nil, failed(err)
	}
	return planInfo{c.param("plan"), p, "rules"}, nil
}

func (s *Service) deletePlan(c *call) (any, *problem) {
	c.target = "plan:" + c.param("plan")
	if err := s.rules.DeletePlan(c.Context(), c.param("plan")); err != nil {
		return nil, failed(err)
	}
	c.status = http.StatusNoContent
	return nil, nil
}

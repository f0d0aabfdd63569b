package controlplane

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/pkg/rules"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore"
)

// peeks is how many buckets of a client are read at once.
const peeks = 16

// client is a client as the rules, the policy and the buckets know it.
type client struct {
	id, name string
	// stored is what the rules have of it; nil: nothing.
	stored *rules.User
	rules  policy.UserRules
	known  bool
	table  *policy.Table
}

// client finds the client that the path names. It need not exist anywhere: every address is a client.
func (s *Service) client(c *call) (client, *problem) {
	c.target = c.param("client")
	name, err := rules.NameOf(c.target)
	if err != nil {
		return client{}, refuse(http.StatusBadRequest, "a client is user:<name>, ip:<address> or ip:<prefix>/<bits>: %v", err)
	}
	cl := client{id: rules.ClientID(name), name: name, known: !rules.IsAddress(name)}
	c.target = cl.id
	cur := s.versions.current()
	if cur == nil {
		return client{}, unavailable("no config is known yet")
	}
	plans, err := s.rules.Plans(c.Context())
	if err != nil {
		return client{}, failed(err)
	}
	own := map[string]policy.Plan{}
	for _, p := range plans {
		own[p.Name] = p.Plan
	}
	if cl.table, err = policy.Compile(cur.policy.WithPlans(own), cur.Version); err != nil {
		return client{}, invalid(err)
	}
	if u, ok := cur.policy.Users[name]; ok {
		cl.rules = policy.UserRules{Name: name, Plan: u.Plan, Admin: u.Admin}
		return cl, nil
	}
	u, err := s.rules.User(c.Context(), name)
	switch {
	case err == nil:
		u.DropExpired(time.Now())
		cl.stored = &u
		cl.rules, _ = u.Rules(time.Now())
	case !errors.Is(err, rulestore.ErrNotFound):
		return client{}, failed(err)
	case cl.known:
		return client{}, refuse(http.StatusNotFound, "there is no user %s", name)
	}
	return cl, nil
}

// limits are the buckets of a client that a filter takes, by scope: each route's of its own, and those
// over all routes. M is what upstreams' last ticks said.
func (cl client) limits(multiplier func(upstream string) int64, takes func(scope string) bool) []store.Limit {
	byScope := map[string]store.Limit{}
	for name := range cl.table.Policy().Routes {
		r := cl.table.Route(name)
		for _, l := range cl.table.Limits(r, cl.rules, cl.known) {
			m := int64(bucket.One)
			if l.Adaptive {
				m = multiplier(r.Upstream)
			}
			if takes(l.Scope) {
				byScope[l.Scope] = store.Limit{Scope: l.Scope, Spec: bucket.Effective(l.Limit, m)}
			}
		}
	}
	limits := make([]store.Limit, 0, len(byScope))
	for _, scope := range slices.Sorted(maps.Keys(byScope)) {
		limits = append(limits, byScope[scope])
	}
	return limits
}

// balance is one bucket of a client; amounts are in tokens, times in seconds.
type balance struct {
	// Scope is a route's name, "@plan" or "@day".
	Scope        string  `json:"scope"`
	Algorithm    string  `json:"algorithm"`
	Capacity     float64 `json:"capacity"`
	Rate         float64 `json:"rate,omitempty"`
	Window       int64   `json:"window,omitempty"`
	Remaining    float64 `json:"remaining"`
	Grace        float64 `json:"grace"`
	ResetSeconds float64 `json:"reset_seconds"`
	Changes      int64   `json:"changes"` // since the bucket was made; 0: it is full, and stored nowhere
}

type clientReply struct {
	Client   string      `json:"client"`
	Plan     string      `json:"plan,omitempty"`
	Admin    bool        `json:"admin,omitempty"`
	Blocked  bool        `json:"blocked"`
	Rules    *rules.User `json:"rules"`
	Balances []balance   `json:"balances"`
}

func tokens(micro int64) float64 { return float64(micro) / bucket.One }

func (s *Service) getClient(c *call) (any, *problem) {
	cl, refusal := s.client(c)
	if refusal != nil {
		return nil, refusal
	}
	balances, refusal := s.balances(c.Context(), cl, func(string) bool { return true })
	return reply(cl.reply(balances), refusal)
}

func (cl client) reply(balances []balance) clientReply {
	return clientReply{
		Client: cl.id, Plan: cl.rules.Plan, Admin: cl.rules.Admin, Blocked: cl.rules.Blocked, Rules: cl.stored, Balances: balances,
	}
}

// balances looks at buckets without charging them.
func (s *Service) balances(ctx context.Context, cl client, takes func(string) bool) ([]balance, *problem) {
	if s.store == nil {
		return nil, refuse(http.StatusNotImplemented, "this controlplane has no Redis, so it can't see balances")
	}
	limits := cl.limits(s.status.multiplier, takes)
	out := make([]balance, len(limits))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(peeks)
	for i, l := range limits {
		g.Go(func() error {
			d, err := s.store.Check(ctx, store.Check{Client: cl.id, Limits: []store.Limit{l}})
			if err != nil {
				return err
			}
			state := d.Limits[0]
			out[i] = balance{
				Scope: l.Scope, Algorithm: string(l.Spec.Kind), Capacity: tokens(l.Spec.Capacity), Rate: tokens(l.Spec.Rate), Window: l.Spec.Window,
				Remaining: tokens(state.Remaining), Grace: tokens(state.Grace), ResetSeconds: float64(state.Reset) / 1e6, Changes: state.Seq,
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, unavailable("Redis does not answer: %v", err)
	}
	return out, nil
}

// scopeBody names the buckets of an operation.
type scopeBody struct {
	// Scope is a route's name, "@plan" or "@day"; "": all of the client's.
	Scope string `json:"scope"`
}

func (b scopeBody) takes(scope string) bool { return b.Scope == "" || b.Scope == scope }

// adjust changes a client's buckets, and has every edge forget what it remembers of them.
func (s *Service) adjust(c *call, b scopeBody, to func(store.Limit) store.Adjustment) (any, *problem) {
	cl, refusal := s.client(c)
	if refusal != nil {
		return nil, refusal
	}
	if s.store == nil {
		return nil, refuse(http.StatusNotImplemented, "this controlplane has no Redis, so it can't change balances")
	}
	limits := cl.limits(s.status.multiplier, b.takes)
	if len(limits) == 0 {
		return nil, fieldProblem("scope", "the client has no limit "+b.Scope)
	}
	for _, l := range limits {
		a := to(l)
		a.Client, a.Limit = cl.id, l
		if _, err := s.store.Adjust(c.Context(), a); err != nil {
			return nil, unavailable("Redis does not answer; limit %s may or may not have been changed, those before it were: %v", l.Scope, err)
		}
	}
	s.announce(cl.id, b.Scope)
	balances, refusal := s.balances(c.Context(), cl, b.takes)
	return reply(cl.reply(balances), refusal)
}

func (s *Service) resetClient(c *call) (any, *problem) {
	var b scopeBody
	if refusal := c.decode(&b); refusal != nil {
		return nil, refusal
	}
	c.detail = "scope " + b.Scope
	return s.adjust(c, b, func(store.Limit) store.Adjustment { return store.Adjustment{Reset: true} })
}

func (s *Service) grantClient(c *call) (any, *problem) {
	var b struct {
		scopeBody
		Scope string `json:"scope"`
		// Tokens to give back.
		Tokens float64 `json:"tokens"`
	}
	if refusal := c.decode(&b); refusal != nil {
		return nil, refusal
	}
	if b.Tokens < 1.0/bucket.One || b.Tokens > bucket.MaxTokens {
		return nil, fieldProblem("tokens", "must be a number from 0.000001 to 100000000")
	}
	amount := int64(b.Tokens*bucket.One + 0.5)
	return s.adjust(c, scopeBody{b.Scope}, func(store.Limit) store.Adjustment { return store.Adjustment{Grant: amount} })
}

// raiseClient gives a client another limit for a time.
func (s *Service) raiseClient(c *call) (any, *problem) {
	var b struct {
		policy.Override
		// Seconds is how long it lasts; or Expires says until when.
		Seconds float64 `json:"seconds"`
	}
	cl, refusal := s.client(c)
	if refusal != nil {
		return nil, refusal
	}
	if refusal := c.decode(&b); refusal != nil {
		return nil, refusal
	}
	expires, refusal := ending(b.Seconds, b.Expires)
	if refusal != nil {
		return nil, refusal
	}
	if b.Expires = expires; expires.IsZero() {
		return nil, fieldProblem("seconds", "must be set, or expires; a limit for good is an override (PUT /api/users/{user}/overrides/{route})")
	}
	return reply(s.override(c, cl.name, b.Override, func(u *rules.User) *problem {
		i := slices.IndexFunc(u.Overrides, func(o policy.Override) bool { return o.Route == b.Route && o.Expires.IsZero() })
		if i < 0 {
			return nil
		}
		return refuse(http.StatusConflict, "the client has an override of this route for good, which would be lost: change that one, or delete it first")
	}))
}

// maxSeconds bounds a block or a raise: 10 years.
const maxSeconds = 10 * 365 * 86400

// ending is when something ends that lasts for seconds, or until a time; zero: neither is set.
func ending(seconds float64, until time.Time) (time.Time, *problem) {
	switch {
	case seconds != 0 && !until.IsZero():
		return until, fieldProblem("seconds", "and a time are both set; set one")
	case seconds < 0 || seconds > maxSeconds:
		return until, fieldProblem("seconds", "must be a number from 0 to 315360000")
	case seconds > 0:
		return rulestore.Now().Add(time.Duration(seconds * float64(time.Second))), nil
	case !until.IsZero() && !until.After(time.Now()):
		return until, fieldProblem("until", "is in the past")
	}
	return until, nil
}

func (s *Service) blockClient(c *call) (any, *problem) {
	var b struct {
		Seconds float64   `json:"seconds"`
		Until   time.Time `json:"until"`
		Reason  string    `json:"reason"`
	}
	cl, refusal := s.client(c)
	if refusal != nil {
		return nil, refusal
	}
	if refusal := c.decode(&b); refusal != nil {
		return nil, refusal
	}
	until, refusal := ending(b.Seconds, b.Until)
	if refusal != nil {
		return nil, refusal
	}
	if b.Reason == "" {
		b.Reason = c.reason
	} else if c.reason == "" {
		c.reason = oneLine(b.Reason)
	}
	return reply(s.updateOrCreate(c, cl.name, func(u *rules.User) *problem {
		u.Block = &rules.Block{Until: until, Reason: b.Reason}
		return nil
	}))
}

func (s *Service) unblockClient(c *call) (any, *problem) {
	cl, refusal := s.client(c)
	if refusal != nil {
		return nil, refusal
	}
	return reply(s.updateOrCreate(c, cl.name, func(u *rules.User) *problem { u.Block = nil; return nil }))
}

// announce tells every edge that what it remembers of a client's buckets (of one, or with scope "" of
// all) no longer holds. It is lost while NATS is away; what edges remember lives for seconds.
func (s *Service) announce(client, scope string) {
	data, err := events.Encode(events.BucketsChanged{Buckets: []events.ChangedBucket{{Client: client, Scope: scope}}})
	if err == nil {
		err = s.bus.Send(events.SubjectChanged(store.ShardOf(client)), data)
	}
	if err != nil {
		s.log.Warn().Err(err).Str("client", client).Msg("edges can't be told of a change")
	}
}

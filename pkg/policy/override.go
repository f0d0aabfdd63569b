package policy

import (
	"reflect"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// Override is a limit of one client in place of what its plan or the route gives it, for good or for a time.
type Override struct {
	// Route is the route whose quota it replaces, by Quota; "": what holds over all routes, by Plan.
	Route string `json:"route,omitempty"`
	Quota
	Plan
	// Expires is when it ends; zero: never.
	Expires time.Time `json:"expires,omitzero"`
}

// Live reports whether the override holds at now.
func (o Override) Live(now time.Time) bool { return o.Expires.IsZero() || now.Before(o.Expires) }

// Validate reports what is wrong with the override under p, as Errors whose paths begin with at.
func (o Override) Validate(p Policy, at string) error {
	v := validator{p: p.withDefaults()}
	v.numbers(reflect.ValueOf(o), at)
	if o.Route == "" {
		if o.Quota != (Quota{}) {
			v.errs.add(at, 0, "a quota needs a route; over all routes set rate and burst, daily_quota, rpm or tpm")
		}
		if reflect.ValueOf(o.Plan).IsZero() {
			v.errs.add(at, 0, "is empty; set rate and burst, daily_quota, rpm or tpm")
		}
		v.plan(at, o.Plan)
		return v.errs.err()
	}
	r, ok := v.p.Routes[o.Route]
	if !ok {
		v.errs.add(join(at, "route"), 0, "there is no route %s; the routes are %s", shorten(o.Route), list(v.p.Routes))
		return v.errs.err()
	}
	if !reflect.ValueOf(o.Plan).IsZero() {
		v.errs.add(at, 0, "rate, burst, daily_quota, rpm and tpm hold over all routes; on a route set its quota")
	}
	v.override(at, o.Quota, v.p.algorithmOf(r))
	return v.errs.err()
}

// ValidatePlan reports what is wrong with a plan of that name, as Errors.
func ValidatePlan(name string, p Plan) error {
	v := validator{}
	v.name("plans", name)
	v.numbers(reflect.ValueOf(p), join("plans", name))
	v.plan(join("plans", name), p)
	return v.errs.err()
}

// ValidName reports whether a route, an upstream, a plan or a user may be called so; NameProblem says how.
func ValidName(name string) bool { return nameForm.MatchString(name) }

// NameProblem says what names are like.
const NameProblem = nameProblem

// overridden is what a client with overrides is held to: on the route the first of its override,
// the policy's word on it, its plan's and the route's; over all routes its override, else its plan.
func (t *Table) overridden(r *Rules, user UserRules, plan string) []ScopedLimit {
	route := t.policy.Routes[r.Name]
	quota, set := route.Users[user.Name]
	if !set {
		if quota, set = route.Plans[plan]; !set {
			quota = route.Quota
		}
	}
	over := t.policy.Plans[plan]
	for _, o := range *user.Overrides {
		switch {
		case o.Route == "" && (o.Rate != 0 || o.DailyQuota != 0): // else it says rpm and tpm alone
			over = o.Plan
		case o.Route == r.Name && o.fits(r.Algorithm):
			quota = o.Quota
		}
	}
	return r.resolve(quota, over)
}

// fits reports whether the quota says what it is under an algorithm; the route's may have been switched since.
func (q Quota) fits(algorithm bucket.Kind) bool {
	if algorithm == bucket.SlidingWindow {
		return q.SlidingLimit > 0 && q.WindowSeconds > 0
	}
	return q.Capacity > 0 && q.RefillRate > 0
}

// WithPlans is p with further plans, which replace those of their names.
func (p Policy) WithPlans(plans map[string]Plan) Policy {
	p = p.withDefaults() // its maps are its own
	for name, plan := range plans {
		p.Plans[name] = plan
	}
	return p
}

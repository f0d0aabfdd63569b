package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/big"
	"net/url"
	"strconv"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// Compile makes the table of a policy; an invalid policy has none.
func Compile(p Policy, version uint64) (*Table, error) {
	p = p.withDefaults()
	if err := p.Validate(); err != nil {
		return nil, err
	}
	t := &Table{
		version:   version,
		policy:    p,
		routes:    make(map[string]*Rules, len(p.Routes)),
		hosts:     make(map[string]paths),
		users:     make(map[[sha256.Size]byte]UserRules),
		upstreams: make(map[string]UpstreamRules, len(p.Upstreams)),
	}
	for name, u := range p.Upstreams {
		rules, err := u.compile()
		if err != nil {
			return nil, fmt.Errorf("policy: upstreams.%s: %w", name, err)
		}
		t.upstreams[name] = rules
	}
	for name, u := range p.Users {
		for _, h := range u.KeyHashes {
			var digest [sha256.Size]byte
			if _, err := hex.Decode(digest[:], []byte(h)); err != nil {
				return nil, fmt.Errorf("policy: users.%s: %w", name, err)
			}
			t.users[digest] = UserRules{Name: name, Plan: u.Plan, Admin: u.Admin, RPM: u.RPM, TPM: u.TPM}
		}
	}
	for name, r := range p.Routes {
		rules := p.compileRoute(name, r)
		t.routes[name] = rules
		t.addRoute(r, rules)
	}
	return t, nil
}

func (u Upstream) compile() (UpstreamRules, error) {
	urls := make([]*url.URL, len(u.places()))
	for i, place := range u.places() {
		var err error
		if urls[i], err = url.Parse(place); err != nil {
			return UpstreamRules{}, err
		}
	}
	h := u.Health
	return UpstreamRules{
		URLs:             urls,
		Timeout:          seconds(u.TimeoutSeconds),
		TrustComputeCost: *u.TrustComputeCost,
		PassHost:         *u.PassHost,
		Connections: ConnectionRules{
			HTTP2: u.HTTP2, Max: int(u.MaxConnections),
			ConnectTimeout: seconds(u.ConnectTimeoutSeconds), IdleTimeout: seconds(u.IdleTimeoutSeconds),
		},
		Health: HealthRules{
			SlowP95: millionths(h.SlowP95Ms / 1000), FastP95: millionths(h.FastP95Ms / 1000),
			ErrorRate: millionths(h.ErrorRate), ClearRate: millionths(h.ClearRate),
			Floor: millionths(h.Floor), Decrease: millionths(h.Decrease), Increase: millionths(h.Increase),
			MinSamples: h.MinSamples, Window: h.Window, MaxAge: millionths(h.MaxAgeSeconds),
		},
	}, nil
}

func (p Policy) compileRoute(name string, r Route) *Rules {
	rules := &Rules{
		Name:              name,
		Upstream:          r.Upstream,
		Deny:              r.Deny,
		Shadow:            p.ShadowMode,
		Algorithm:         p.algorithmOf(r),
		Cost:              millionths(*r.Cost),
		MaxCost:           millionths(r.MaxCost),
		CostPerSecond:     millionths(r.CostPerSecond),
		ExposeComputeCost: r.ExposeComputeCost,
		MaxBodyBytes:      r.MaxBodyBytes,
		LeaseSize:         *cmp.Or(r.LeaseSize, p.LeaseSize) * bucket.One,
		LeaseTTL:          millionths(cmp.Or(r.LeaseSeconds, p.LeaseSeconds)),
		refund:            r.Refund,
		Fallback:          r.Fallback,
		Degrade:           r.Degrade,
		MaxStale:          time.Duration(r.MaxStaleSeconds) * time.Second,
		deferMethods:      r.DeferMethods,
		Headers:           r.Headers,
		CORS:              r.CORS,
		LLM:               r.LLM,
		limits:            make(map[string][]ScopedLimit, len(p.Plans)+1),
		byUser:            make(map[string][]ScopedLimit, len(r.Users)),
	}
	if r.ShadowMode != nil {
		rules.Shadow = *r.ShadowMode
	}
	rules.limits[""] = rules.resolve(r.Quota, Plan{})
	for plan, limits := range p.Plans {
		quota, own := r.Plans[plan]
		if !own {
			quota = r.Quota
		}
		rules.limits[plan] = rules.resolve(quota, limits)
	}
	for user, quota := range r.Users {
		rules.byUser[user] = rules.resolve(quota, p.Plans[p.Users[user].Plan])
	}
	return rules
}

// resolve gives the limits of a client with this quota on the route and this
// plan. One of them at the most can have grace: the route's own, else the plan's. On an LLM route
// none has (Degrade is off): a call can't be answered by less, nor put off.
func (r *Rules) resolve(q Quota, plan Plan) []ScopedLimit {
	var limits []ScopedLimit
	grace := r.Degrade != DegradeOff
	if q != (Quota{}) {
		limits = append(limits, ScopedLimit{Scope: r.Name, Limit: q.limit(r.Algorithm, grace), Adaptive: true})
	}
	if plan.Rate != 0 {
		limits = append(limits, ScopedLimit{Scope: bucket.ScopePlan, Limit: bucket.Limit{
			Kind: bucket.TokenBucket, Capacity: plan.Burst, Rate: millionths(plan.Rate), Grace: grace && len(limits) == 0,
		}})
	}
	if plan.DailyQuota != 0 {
		limits = append(limits, ScopedLimit{Scope: bucket.ScopeDay, Limit: bucket.Limit{
			Kind: bucket.DailyQuota, Capacity: plan.DailyQuota,
		}})
	}
	return limits
}

func (q Quota) limit(algorithm bucket.Kind, grace bool) bucket.Limit {
	l := bucket.Limit{Kind: algorithm, Grace: grace, MaxDebt: q.MaxDebt * bucket.One}
	if algorithm == bucket.SlidingWindow {
		l.Capacity, l.Window = q.SlidingLimit, q.WindowSeconds
	} else {
		l.Capacity, l.Rate = q.Capacity, millionths(q.RefillRate)
	}
	return l
}

func seconds(x float64) time.Duration { return time.Duration(millionths(x)) * time.Microsecond }

// millionths is x × 10⁶ rounded half up, reckoned on x as it was written in
// decimal: binary fractions would round 0.0000015 down. Bounds keep it in range.
func millionths(x float64) int64 {
	r, ok := new(big.Rat).SetString(strconv.FormatFloat(x, 'f', -1, 64))
	if !ok {
		return 0 // not a finite number; Validate has refused it
	}
	r.Mul(r, big.NewRat(bucket.One, 1))
	r.Add(r, big.NewRat(1, 2))
	return new(big.Int).Div(r.Num(), r.Denom()).Int64()
}

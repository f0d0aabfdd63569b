package policy

import (
	"encoding/hex"
	"maps"
	"net/netip"
	"net/url"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// Defaults of the numbers that have one; deploy/policy.example.yaml says so too.
const (
	defaultTimeoutSeconds = 30
	defaultMaxConnections = 4096
	defaultConnectSeconds = 5
	defaultIdleSeconds    = 90
	defaultCost           = 1
	defaultMaxCost        = 1_000_000
	defaultMaxBodyBytes   = 64 << 20
	defaultCORSMaxAge     = 600
	defaultMaxStale       = 3600
	defaultLeaseSize      = 10
	defaultLeaseSeconds   = 5
	defaultTokens         = 256
	defaultMaxReserve     = 1024
	defaultInspectBytes   = 1 << 20
)

var (
	defaultRefund  = []Refund{RefundUnreached}
	defaultHeaders = []HeaderFamily{RateLimitHeaders}
	// Idempotent by RFC 9110; TRACE is for nobody to repeat.
	defaultDeferMethods = []string{"GET", "HEAD", "OPTIONS", "PUT", "DELETE"}
	defaultCORSMethods  = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"}
	defaultCORSHeaders  = []string{"Accept", "Authorization", "Content-Type", "X-API-Key", "X-Requested-With"}
)

var defaultHealth = Health{
	SlowP95Ms: 800, FastP95Ms: 300, ErrorRate: 0.15, ClearRate: 0.05,
	Floor: 0.2, Decrease: 0.5, Increase: 0.05,
	MinSamples: 10, Window: 30, MaxAgeSeconds: 60,
}

// withDefaults is p with every default filled in and every spelling made the
// same. It shares no map or slice that it changes with p.
func (p Policy) withDefaults() Policy {
	orElse(&p.Algorithm, bucket.TokenBucket)
	if p.LeaseSize == nil {
		p.LeaseSize = new(int64(defaultLeaseSize))
	}
	orElse(&p.LeaseSeconds, defaultLeaseSeconds)

	p.Upstreams = eachValue(p.Upstreams, func(u Upstream) Upstream {
		orElse(&u.TimeoutSeconds, defaultTimeoutSeconds)
		if len(u.URLs) == 0 {
			u.URLs = nil
		}
		if u.TrustComputeCost == nil {
			u.TrustComputeCost = new(true)
		}
		if u.PassHost == nil {
			u.PassHost = new(!strings.HasPrefix(strings.ToLower(u.places()[0]), "https:"))
		}
		orElse(&u.MaxConnections, defaultMaxConnections)
		orElse(&u.ConnectTimeoutSeconds, defaultConnectSeconds)
		orElse(&u.IdleTimeoutSeconds, defaultIdleSeconds)
		u.Health = u.Health.withDefaults()
		return u
	})
	p.Routes = eachValue(p.Routes, func(r Route) Route {
		r.Host = strings.ToLower(r.Host)
		if r.Cost == nil {
			r.Cost = new(float64(defaultCost))
		}
		orElse(&r.MaxCost, defaultMaxCost)
		orElse(&r.MaxBodyBytes, defaultMaxBodyBytes)
		if len(r.Methods) == 0 {
			r.Methods = nil
		}
		if len(r.Plans) == 0 {
			r.Plans = nil
		}
		if len(r.Users) == 0 {
			r.Users = nil
		}
		if r.Refund == nil {
			r.Refund = slices.Clone(defaultRefund)
		}
		orElse(&r.Kind, HTTP)
		if r.Kind == LLMs {
			r.LLM = r.LLM.withDefaults()
			orElse(&r.Degrade, DegradeOff)
		}
		orElse(&r.Fallback, FallbackLocal)
		orElse(&r.Degrade, DegradeDefer)
		orElse(&r.MaxStaleSeconds, defaultMaxStale)
		if r.DeferMethods == nil {
			r.DeferMethods = slices.Clone(defaultDeferMethods)
		}
		if r.Headers == nil {
			r.Headers = slices.Clone(defaultHeaders)
		}
		r.CORS = r.CORS.withDefaults()
		return r
	})
	if p.Profiles = eachValue(p.Profiles, func(p Profile) Profile {
		if len(p.Models) == 0 {
			p.Models = nil
		}
		return p
	}); len(p.Profiles) == 0 {
		p.Profiles = nil
	}
	p.Users = eachValue(p.Users, func(u User) User {
		hashes := make([]string, len(u.KeyHashes))
		for i, h := range u.KeyHashes {
			hashes[i] = strings.ToLower(h)
		}
		u.KeyHashes = hashes
		return u
	})
	plans := DefaultPlans()
	maps.Copy(plans, p.Plans)
	p.Plans = plans
	return p
}

func (h Health) withDefaults() Health {
	orElse(&h.SlowP95Ms, defaultHealth.SlowP95Ms)
	orElse(&h.FastP95Ms, defaultHealth.FastP95Ms)
	orElse(&h.ErrorRate, defaultHealth.ErrorRate)
	orElse(&h.ClearRate, defaultHealth.ClearRate)
	orElse(&h.Floor, defaultHealth.Floor)
	orElse(&h.Decrease, defaultHealth.Decrease)
	orElse(&h.Increase, defaultHealth.Increase)
	orElse(&h.MinSamples, defaultHealth.MinSamples)
	orElse(&h.Window, defaultHealth.Window)
	orElse(&h.MaxAgeSeconds, defaultHealth.MaxAgeSeconds)
	return h
}

func (c *CORS) withDefaults() *CORS {
	if c == nil {
		return nil
	}
	with := *c
	if with.AllowedMethods == nil {
		with.AllowedMethods = slices.Clone(defaultCORSMethods)
	}
	if with.AllowedHeaders == nil {
		with.AllowedHeaders = slices.Clone(defaultCORSHeaders)
	}
	if len(with.ExposeHeaders) == 0 {
		with.ExposeHeaders = nil
	}
	orElse(&with.MaxAgeSeconds, defaultCORSMaxAge)
	return &with
}

func (l *LLM) withDefaults() *LLM {
	var with LLM
	if l != nil {
		with = *l
	}
	orElse(&with.DefaultTokens, defaultTokens)
	orElse(&with.MaxReserve, defaultMaxReserve)
	orElse(&with.InspectBytes, defaultInspectBytes)
	if with.AddUsage == nil {
		with.AddUsage = new(true)
	}
	return &with
}

// places are the URLs of an upstream, at least one.
func (u Upstream) places() []string {
	if len(u.URLs) > 0 {
		return u.URLs
	}
	return []string{u.URL}
}

func orElse[T comparable](field *T, otherwise T) {
	var zero T
	if *field == zero {
		*field = otherwise
	}
}

func eachValue[V any](m map[string]V, change func(V) V) map[string]V {
	out := make(map[string]V, len(m))
	for k, v := range m {
		out[k] = change(v)
	}
	return out
}

// sortedKeys makes errors come in the same order every time.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// Validate reports what is wrong with p, as Errors. A field left zero is absent
// and stands for its default.
func (p Policy) Validate() error {
	v := validator{p: p.withDefaults()}
	v.numbers(reflect.ValueOf(v.p), "")
	if !known(v.p.Algorithm) {
		v.errs.add("algorithm", 0, algorithmProblem)
	}
	v.counts()
	for _, name := range sortedKeys(v.p.Upstreams) {
		v.name("upstreams", name)
		v.upstream(join("upstreams", name), v.p.Upstreams[name])
	}
	for _, name := range sortedKeys(v.p.Plans) {
		v.name("plans", name)
		v.plan(join("plans", name), v.p.Plans[name])
	}
	v.users()
	if a := v.p.AnonymousPlan; a != "" {
		v.planExists("anonymous_plan", a)
	}
	v.routes()
	for _, name := range sortedKeys(v.p.Profiles) {
		v.name("profiles", name)
		v.profile(join("profiles", name), v.p.Profiles[name])
	}
	return v.errs.err()
}

// validator collects the problems of one policy, whose defaults are filled in.
type validator struct {
	p    Policy
	errs Errors
}

const algorithmProblem = "must be token_bucket or sliding_window"

func known(k bucket.Kind) bool { return k == bucket.TokenBucket || k == bucket.SlidingWindow }

func (v *validator) counts() {
	for _, c := range []struct {
		path     string
		has, max int
	}{
		{"upstreams", len(v.p.Upstreams), MaxUpstreams},
		{"routes", len(v.p.Routes), MaxRoutes},
		{"plans", len(v.p.Plans), MaxPlans},
		{"users", len(v.p.Users), MaxUsers},
		{"profiles", len(v.p.Profiles), MaxProfiles},
	} {
		if c.has > c.max {
			v.errs.add(c.path, 0, "has %d entries; at most %d are allowed", c.has, c.max)
		}
	}
}

func (v *validator) name(of, name string) {
	if !nameForm.MatchString(name) {
		v.errs.add(join(of, name), 0, nameProblem)
	}
}

// numbers holds every number that is set against its bound.
func (v *validator) numbers(x reflect.Value, at string) {
	switch x.Kind() {
	case reflect.Struct:
		fields := fieldsOf(x.Type())
		for _, key := range sortedKeys(fields.byKey) {
			f := x.FieldByIndex(fields.byKey[key])
			pointed := f.Kind() == reflect.Pointer && !f.IsNil()
			if pointed {
				f = f.Elem()
			}
			var number float64
			switch {
			case f.CanInt():
				number = float64(f.Int())
			case f.CanFloat():
				number = f.Float()
			default:
				v.numbers(f, join(at, key))
				continue
			}
			if f.IsZero() && !pointed {
				continue // absent
			}
			if p := bounds[key].problem(number); p != "" {
				v.errs.add(join(at, key), 0, "%s, not %s", p, decimal(number))
			}
		}
	case reflect.Slice:
		for i := range x.Len() {
			v.numbers(x.Index(i), index(at, i))
		}
	case reflect.Map:
		keys := x.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) })
		for _, k := range keys {
			v.numbers(x.MapIndex(k), join(at, k.String()))
		}
	}
}

func (v *validator) upstream(at string, u Upstream) {
	switch {
	case len(u.URLs) == 0:
		v.url(join(at, "url"), u.URL)
	case u.URL != "":
		v.errs.add(join(at, "urls"), 0, "set url or urls, not both")
	case len(u.URLs) > maxListed:
		v.errs.add(join(at, "urls"), 0, "has %d entries; at most %d are allowed", len(u.URLs), maxListed)
	}
	for i, place := range u.URLs {
		v.url(index(join(at, "urls"), i), place)
		if slices.Contains(u.URLs[:i], place) {
			v.errs.add(index(join(at, "urls"), i), 0, "is there twice")
		}
	}
	h, at := u.Health, join(at, "health")
	if h.FastP95Ms >= h.SlowP95Ms {
		v.errs.add(join(at, "fast_p95_ms"), 0, "%s must be below slow_p95_ms, %s", decimal(h.FastP95Ms), decimal(h.SlowP95Ms))
	}
	if h.ClearRate > h.ErrorRate {
		v.errs.add(join(at, "clear_error_rate"), 0, "%s must not be above error_rate, %s", decimal(h.ClearRate), decimal(h.ErrorRate))
	}
	if h.MinSamples > h.Window {
		v.errs.add(join(at, "min_samples"), 0, "%d must not be above window, %d", h.MinSamples, h.Window)
	}
}

func (v *validator) url(at, text string) {
	switch parsed, err := url.Parse(text); {
	case text == "":
		v.errs.add(at, 0, "must be set, such as http://127.0.0.1:8070")
	case err != nil:
		v.errs.add(at, 0, "is not a URL; write http(s)://host[:port][/prefix]")
	case parsed.Scheme != "http" && parsed.Scheme != "https", parsed.Hostname() == "", parsed.Opaque != "",
		parsed.User != nil, parsed.RawQuery != "" || parsed.ForceQuery, parsed.Fragment != "", strings.HasSuffix(text, "#"):
		v.errs.add(at, 0, "must be http(s)://host[:port][/prefix], without user, query or fragment")
	}
}

func (v *validator) profile(at string, p Profile) {
	switch p.RoutingStrategy {
	case "", LeastRequest, RoundRobin, Random:
	default:
		v.errs.add(join(at, "routingStrategy"), 0, "must be least-request, round-robin or random, not %s", shorten(string(p.RoutingStrategy)))
	}
	if len(p.Models) > maxModels {
		v.errs.add(join(at, "models"), 0, "has %d entries; at most %d are allowed", len(p.Models), maxModels)
		return
	}
	named := make(map[string]bool, len(p.Models))
	for i, m := range p.Models {
		at := index(join(at, "models"), i)
		switch {
		case m.Model == "" || len(m.Model) > maxModelName:
			v.errs.add(join(at, "model"), 0, "must be the name of a model, of at most %d bytes", maxModelName)
		case named[m.Model]:
			v.errs.add(join(at, "model"), 0, "%s is there twice", shorten(m.Model))
		case m.RequestsPerSecond == 0:
			v.errs.add(join(at, "requestsPerSecond"), 0, "must be set; to leave the model to the profile's, remove its entry")
		}
		named[m.Model] = true
	}
}

func (v *validator) plan(at string, p Plan) {
	if p.Rate == 0 && p.Burst != 0 {
		v.errs.add(join(at, "rate"), 0, "must be set, as burst is; set both or neither")
	}
	if p.Rate != 0 && p.Burst == 0 {
		v.errs.add(join(at, "burst"), 0, "must be set, as rate is; set both or neither")
	}
}

func (v *validator) planExists(at, plan string) {
	if _, ok := v.p.Plans[plan]; !ok {
		v.errs.add(at, 0, "there is no plan %s; the plans are %s", shorten(plan), list(v.p.Plans))
	}
}

func (v *validator) users() {
	owner := make(map[string]string)
	for _, name := range sortedKeys(v.p.Users) {
		v.name("users", name)
		u, at := v.p.Users[name], join("users", name)
		if u.Plan != "" {
			v.planExists(join(at, "plan"), u.Plan)
		}
		for i, h := range u.KeyHashes {
			at := index(join(at, "key_hashes"), i)
			if digest, err := hex.DecodeString(h); err != nil || len(digest) != 32 {
				v.errs.add(at, 0, "must be the SHA-256 of an API key in 64 hexadecimal digits (printf %%s KEY | sha256sum)")
			} else if other, taken := owner[h]; taken {
				v.errs.add(at, 0, "this key belongs to %s already; a key has one user", other)
			}
			owner[h] = join("users", name)
		}
	}
}

var (
	methodForm = regexp.MustCompile(`^[A-Z][A-Z-]{0,31}$`)
	// fieldForm is a field name, originForm an origin as browsers send it, with at most one *.
	fieldForm  = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}$")
	originForm = regexp.MustCompile(`^[a-z][a-z0-9+.-]*://([a-z0-9_.*-]{1,253}|\[[0-9a-f:.]+\])(:[0-9]{1,5}|:\*)?$`)
	hostForm   = regexp.MustCompile(`^[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?$`)
)

const (
	maxPath    = 1024
	maxMethods = 16
	maxListed  = 64 // entries of a list of CORS, or of an upstream's URLs
	maxModels  = 256
	// maxModelName is the longest name of a model that is told apart, in bytes.
	maxModelName = 256
)

func (v *validator) routes() {
	type place struct{ host, path, method string }
	taken := make(map[place]string)
	for _, name := range sortedKeys(v.p.Routes) {
		v.name("routes", name)
		r, at := v.p.Routes[name], join("routes", name)
		v.route(at, r)

		methods := r.Methods
		if len(methods) == 0 {
			methods = []string{anyMethod}
		}
		for _, m := range methods {
			where := place{r.Host, r.Path, m}
			if other, dup := taken[where]; dup {
				v.errs.add(join(at, "path"), 0, "%s takes the same requests; give them another host, path or methods", other)
				break
			}
			taken[where] = at
		}
	}
}

func (v *validator) route(at string, r Route) {
	v.routePath(join(at, "path"), r.Path)
	if _, err := netip.ParseAddr(r.Host); r.Host != "" && err != nil && !hostForm.MatchString(r.Host) {
		v.errs.add(join(at, "host"), 0, "must be a host name or an IP address, without a port")
	}
	v.methods(join(at, "methods"), r.Methods)
	v.methods(join(at, "defer_methods"), r.DeferMethods)
	if len(r.DeferMethods) == 0 {
		v.errs.add(join(at, "defer_methods"), 0, "is empty; to let nothing run later set degrade: off")
	}
	switch r.Fallback {
	case FallbackLocal, FallbackOpen, FallbackClosed:
	default:
		v.errs.add(join(at, "fallback"), 0, "must be local, open or closed, not %s", shorten(string(r.Fallback)))
	}
	switch r.Degrade {
	case DegradeCache, DegradeDefer, DegradeOff:
	default:
		v.errs.add(join(at, "degrade"), 0, "must be cache, defer or off, not %s", shorten(string(r.Degrade)))
	}
	if _, ok := v.p.Upstreams[r.Upstream]; !ok && !(r.Deny && r.Upstream == "") {
		v.errs.add(join(at, "upstream"), 0, "there is no upstream %s; the upstreams are %s", shorten(r.Upstream), list(v.p.Upstreams))
	}
	if r.Algorithm != "" && !known(r.Algorithm) {
		v.errs.add(join(at, "algorithm"), 0, algorithmProblem)
	}
	switch {
	case r.Kind != HTTP && r.Kind != LLMs:
		v.errs.add(join(at, "kind"), 0, "must be http or llm, not %s", shorten(string(r.Kind)))
	case r.Kind == HTTP && r.LLM != nil:
		v.errs.add(join(at, "llm"), 0, "belongs to a route of kind: llm")
	case r.Kind == LLMs && r.Degrade != DegradeOff:
		v.errs.add(join(at, "degrade"), 0, "must be off on a route of kind: llm; a call can't be answered by less, nor put off")
	}
	if *r.Cost > r.MaxCost {
		v.errs.add(join(at, "cost"), 0, "%s must not be above max_cost, %s", decimal(*r.Cost), decimal(r.MaxCost))
	}
	for i, end := range r.Refund {
		switch {
		case end != RefundUnreached && end != RefundReset && end != RefundTimeout:
			v.errs.add(index(join(at, "refund"), i), 0, "must be unreached, reset or timeout, not %s", shorten(string(end)))
		case slices.Contains(r.Refund[:i], end):
			v.errs.add(index(join(at, "refund"), i), 0, "%s is there twice", end)
		}
	}
	v.headers(join(at, "headers"), r.Headers)
	if r.CORS != nil {
		v.cors(join(at, "cors"), *r.CORS)
	}
	algorithm := v.p.algorithmOf(r)
	v.quota(at, r.Quota, algorithm)
	for _, plan := range sortedKeys(r.Plans) {
		at := join(join(at, "plans"), plan)
		v.planExists(at, plan)
		v.override(at, r.Plans[plan], algorithm)
	}
	for _, user := range sortedKeys(r.Users) {
		at := join(join(at, "users"), user)
		if _, ok := v.p.Users[user]; !ok {
			v.errs.add(at, 0, "there is no user %s", shorten(user))
		}
		v.override(at, r.Users[user], algorithm)
	}
}

func (v *validator) methods(at string, methods []string) {
	if len(methods) > maxMethods {
		v.errs.add(at, 0, "has %d entries; at most %d are allowed", len(methods), maxMethods)
	}
	for i, m := range methods {
		if !methodForm.MatchString(m) {
			v.errs.add(index(at, i), 0, "must be an HTTP method in capitals, such as GET")
		}
	}
}

func (v *validator) headers(at string, families []HeaderFamily) {
	if len(families) == 0 {
		v.errs.add(at, 0, "is empty; name ratelimit, x-ratelimit or ietf, or leave it out")
	}
	for i, f := range families {
		switch {
		case f != RateLimitHeaders && f != XRateLimitHeaders && f != IETFHeaders:
			v.errs.add(index(at, i), 0, "must be ratelimit, x-ratelimit or ietf, not %s", shorten(string(f)))
		case slices.Contains(families[:i], f):
			v.errs.add(index(at, i), 0, "%s is there twice", f)
		}
	}
}

func (v *validator) cors(at string, c CORS) {
	each := func(key string, values []string, problem func(string) string) {
		at := join(at, key)
		if len(values) > maxListed {
			v.errs.add(at, 0, "has %d entries; at most %d are allowed", len(values), maxListed)
			return
		}
		for i, value := range values {
			if p := problem(value); p != "" {
				v.errs.add(index(at, i), 0, "%s", p)
			}
		}
	}
	if len(c.AllowedOrigins) == 0 {
		v.errs.add(join(at, "allowed_origins"), 0, "must name an origin, such as https://app.example.com; to enable no CORS leave cors out")
	}
	each("allowed_origins", c.AllowedOrigins, func(origin string) string {
		switch {
		case origin == "*" && c.AllowCredentials:
			return "* can't go with allow_credentials: browsers refuse it; name the origins"
		case origin == "*", origin == "null":
			return ""
		case !originForm.MatchString(origin) || strings.Count(origin, "*") > 1:
			return "must be scheme://host[:port] in lower case with at most one *, or *"
		}
		return ""
	})
	for key, values := range map[string][]string{"allowed_methods": c.AllowedMethods, "allowed_headers": c.AllowedHeaders} {
		if values != nil && len(values) == 0 {
			v.errs.add(join(at, key), 0, "is empty; for the default leave it out")
		}
	}
	each("allowed_methods", c.AllowedMethods, func(method string) string {
		if methodForm.MatchString(method) {
			return ""
		}
		return "must be an HTTP method in capitals, such as GET"
	})
	field := func(name string) string {
		if fieldForm.MatchString(name) {
			return ""
		}
		return "must be the name of a header"
	}
	each("allowed_headers", c.AllowedHeaders, field)
	each("expose_headers", c.ExposeHeaders, field)
}

func (v *validator) routePath(at, p string) {
	switch {
	case !strings.HasPrefix(p, "/"):
		v.errs.add(at, 0, "must begin with /")
	case len(p) > maxPath:
		v.errs.add(at, 0, "has %d bytes; at most %d are allowed", len(p), maxPath)
	case path.Clean(p) != p:
		v.errs.add(at, 0, "must be clean; write %s", shorten(path.Clean(p)))
	case strings.ContainsFunc(p, func(c rune) bool { return c <= ' ' || c == 0x7f || c == '?' || c == '#' || c == '%' }):
		v.errs.add(at, 0, "must be a decoded path, without spaces, ?, #, %% or control characters")
	}
}

// quota holds the fields of one quota together. Each algorithm needs both of its
// fields, and the one in force must have its own if there is a quota at all.
func (v *validator) quota(at string, q Quota, algorithm bucket.Kind) {
	if q == (Quota{}) {
		return
	}
	token := [2]string{"capacity", "refill_rate"}
	sliding := [2]string{"sliding_limit", "window_seconds"}
	need := func(set, other bool, missing, because string) {
		if !set && other {
			v.errs.add(join(at, missing), 0, "must be set, as %s", because)
		}
	}
	need(q.Capacity != 0, q.RefillRate != 0, token[0], token[1]+" is")
	need(q.RefillRate != 0, q.Capacity != 0, token[1], token[0]+" is")
	need(q.SlidingLimit != 0, q.WindowSeconds != 0, sliding[0], sliding[1]+" is")
	need(q.WindowSeconds != 0, q.SlidingLimit != 0, sliding[1], sliding[0]+" is")

	fields, has := token, q.Capacity != 0 || q.RefillRate != 0
	if algorithm == bucket.SlidingWindow {
		fields, has = sliding, q.SlidingLimit != 0 || q.WindowSeconds != 0
	}
	for _, f := range fields {
		need(has, true, f, "the algorithm in force is "+string(algorithm))
	}
}

// override is a quota that must say something: it replaces the route's, and an empty one would lift the limit unseen.
func (v *validator) override(at string, q Quota, algorithm bucket.Kind) {
	if q == (Quota{}) {
		v.errs.add(at, 0, "is empty; set its quota or remove it")
	}
	v.quota(at, q, algorithm)
}

func (p Policy) algorithmOf(r Route) bucket.Kind {
	if r.Algorithm != "" {
		return r.Algorithm
	}
	return p.Algorithm
}

// list names the keys of m, or the first of many.
func list[V any](m map[string]V) string {
	const most = 20
	keys := sortedKeys(m)
	if len(keys) == 0 {
		return "none"
	}
	rest := ""
	if len(keys) > most {
		keys, rest = keys[:most], ", …"
	}
	for i, k := range keys {
		keys[i] = shorten(k)
	}
	return strings.Join(keys, ", ") + rest
}

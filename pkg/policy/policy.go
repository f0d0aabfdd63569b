package policy

import "github.com/aegisrate/aegisrate/pkg/bucket"

// Bounds of a policy document. They are checked on the way in and again by every edge.
const (
	MaxDocument  = 1 << 20 // bytes of it as read, and of its JSON form
	MaxRoutes    = 1000
	MaxUpstreams = 256
	MaxPlans     = 64
	MaxUsers     = 10_000
	MaxProfiles  = 64
)

// Policy is a whole configuration. Its JSON and YAML forms have the same keys;
// deploy/policy.example.yaml shows every key with its default.
type Policy struct {
	// Algorithm decides every route that names none: token_bucket (default) or sliding_window.
	Algorithm bucket.Kind `json:"algorithm"`
	// ShadowMode lets requests over their limit pass, marked; a route may say otherwise.
	ShadowMode bool `json:"shadow_mode"`
	// LeaseSize is how many tokens at the least an edge takes in advance for a client that asks often
	// enough to spend them within LeaseSeconds, their longest life; default 10 and 5. 0: no leases. A route may say otherwise.
	LeaseSize    *int64              `json:"lease_size,omitempty"`
	LeaseSeconds float64             `json:"lease_seconds,omitempty"`
	Upstreams    map[string]Upstream `json:"upstreams"`
	Routes       map[string]Route    `json:"routes"`
	// Plans are limits over all routes, by name. The four default plans exist unless redefined.
	Plans map[string]Plan `json:"plans"`
	Users map[string]User `json:"users"`
	// AnonymousPlan limits clients without a verified key; "" gives them no plan.
	AnonymousPlan string `json:"anonymous_plan,omitempty"`
	// Profiles are what clients of LLM routes choose from by the header config-profile.
	Profiles map[string]Profile `json:"profiles,omitempty"`
}

// Upstream is a backend that routes point to.
type Upstream struct {
	// URL is http(s)://host[:port][/prefix].
	URL string `json:"url,omitempty"`
	// URLs are several places that serve the same, in place of URL; requests take turns, unless a profile says otherwise.
	URLs []string `json:"urls,omitempty"`
	// TimeoutSeconds bounds the wait for the response head; default 30.
	TimeoutSeconds float64 `json:"timeout_seconds,omitempty"`
	// TrustComputeCost lets this upstream set the cost by X-Compute-Cost; default true.
	TrustComputeCost *bool `json:"trust_compute_cost,omitempty"`
	// HTTP2 speaks nothing but HTTP/2 to the upstream, without TLS too (h2c). Otherwise TLS decides.
	HTTP2 bool `json:"http2,omitempty"`
	// PassHost sends the client's Host on; default: true for http, false for https, where the name is the certificate's.
	PassHost *bool `json:"pass_host,omitempty"`
	// MaxConnections bounds the connections of each edge to the upstream; default 4,096. Requests wait for one, within TimeoutSeconds.
	MaxConnections int64 `json:"max_connections,omitempty"`
	// ConnectTimeoutSeconds bounds the dialling and the TLS handshake, each; default 5.
	ConnectTimeoutSeconds float64 `json:"connect_timeout_seconds,omitempty"`
	// IdleTimeoutSeconds is how long a connection is kept for the next request; default 90.
	IdleTimeoutSeconds float64 `json:"idle_timeout_seconds,omitempty"`
	Health             Health  `json:"health,omitzero"`
}

// Health says how an upstream's multiplier moves; zero fields take the default in brackets.
type Health struct {
	SlowP95Ms     float64 `json:"slow_p95_ms,omitempty"`      // M falls above it [800]
	FastP95Ms     float64 `json:"fast_p95_ms,omitempty"`      // M rises below it [300]
	ErrorRate     float64 `json:"error_rate,omitempty"`       // M falls from it on [0.15]
	ClearRate     float64 `json:"clear_error_rate,omitempty"` // errors are clear below it [0.05]
	Floor         float64 `json:"floor,omitempty"`            // least M [0.2], 0.2 to 1
	Decrease      float64 `json:"decrease,omitempty"`         // factor per unhealthy interval [0.5]
	Increase      float64 `json:"increase,omitempty"`         // added per healthy interval [0.05]
	MinSamples    int     `json:"min_samples,omitempty"`      // needed to fall [10]
	Window        int     `json:"window,omitempty"`           // samples looked at [30], to 1000
	MaxAgeSeconds float64 `json:"max_age_seconds,omitempty"`  // samples age out [60]
}

// Route is a set of requests with an upstream and, optionally, a quota for each client.
type Route struct {
	// Path matches itself and what is below it, by whole segments: "/api" matches "/api" and "/api/x", not "/apix".
	Path string `json:"path"`
	// Host matches exactly, without its port; "" matches any. Methods: empty matches any.
	Host     string   `json:"host,omitempty"`
	Methods  []string `json:"methods,omitempty"`
	Upstream string   `json:"upstream"`
	// Kind is http (default) or llm: a route in front of an OpenAI-compatible API, whose calls are held to RPM, TPM and profiles.
	Kind RouteKind `json:"kind,omitempty"`
	// LLM is how calls are reckoned, on a route of that kind.
	LLM *LLM `json:"llm,omitempty"`
	// Deny refuses every request of the route (403). It is the only way to say "nothing": a quota of 0 is an error.
	Deny bool `json:"deny,omitempty"`
	// Algorithm and ShadowMode override the policy's.
	Algorithm  bucket.Kind `json:"algorithm,omitempty"`
	ShadowMode *bool       `json:"shadow_mode,omitempty"`
	// LeaseSize and LeaseSeconds override the policy's.
	LeaseSize    *int64  `json:"lease_size,omitempty"`
	LeaseSeconds float64 `json:"lease_seconds,omitempty"`
	Quota
	// Plans and Users override Quota for a plan or a user: the first of user, plan, route that is set applies.
	Plans map[string]Quota `json:"plans,omitempty"`
	Users map[string]Quota `json:"users,omitempty"`
	// Cost is charged before the request is forwarded; default 1. 0 makes the route free on admission.
	Cost *float64 `json:"cost,omitempty"`
	// MaxCost caps a settled cost; an X-Compute-Cost above it is not believed. Default 1,000,000.
	MaxCost float64 `json:"max_cost,omitempty"`
	// CostPerSecond prices a second of upstream time where the upstream names no cost; 0 keeps the base cost.
	CostPerSecond float64 `json:"cost_per_second,omitempty"`
	// ExposeComputeCost leaves X-Compute-Cost in the answer to the client.
	ExposeComputeCost bool `json:"expose_compute_cost,omitempty"`
	// MaxBodyBytes bounds the request's body (413 above); default 64 MiB.
	MaxBodyBytes int64 `json:"max_body_bytes,omitempty"`
	// Refund names the ends without an answer whose charge goes back; default RefundUnreached alone; empty: none.
	Refund []Refund `json:"refund,omitzero"`
	// Fallback is how requests are decided while the shared store is away; default FallbackLocal.
	Fallback Fallback `json:"fallback,omitempty"`
	// Degrade is how a request over the limit that grace pays for is answered; default DegradeDefer.
	Degrade Degrade `json:"degrade,omitempty"`
	// MaxStaleSeconds is how long a stored answer may be given out after it has ceased to be fresh; default 3600.
	MaxStaleSeconds int64 `json:"max_stale_seconds,omitempty"`
	// DeferMethods are the methods of requests that may run later, and so perhaps twice; default: the idempotent ones.
	DeferMethods []string `json:"defer_methods,omitempty"`
	// Headers are the families of fields that tell clients of their limits; default: RateLimitHeaders alone.
	Headers []HeaderFamily `json:"headers,omitempty"`
	// CORS lets pages of other origins call the route; nil: the upstream answers for that.
	CORS *CORS `json:"cors,omitempty"`
}

// Refund is an end of a request, without a byte of an answer, for which the client need not pay.
type Refund string

const (
	// RefundUnreached: no byte reached the upstream (refused, unresolved, dial timeout).
	RefundUnreached Refund = "unreached"
	// RefundReset: the upstream broke off; it may have done the work.
	RefundReset Refund = "reset"
	// RefundTimeout: the upstream did not answer in time; it may have done the work.
	RefundTimeout Refund = "timeout"
)

// Fallback is how a route goes on without the shared store.
type Fallback string

const (
	// FallbackLocal: each edge admits its share of every limit.
	FallbackLocal Fallback = "local"
	// FallbackOpen: everything passes. The edge's share is charged as far as it goes.
	FallbackOpen Fallback = "open"
	// FallbackClosed: everything is refused with 503.
	FallbackClosed Fallback = "closed"
)

// Degrade is what a yellow request gets.
type Degrade string

const (
	// DegradeCache: a stored answer, and where there is none what DegradeDefer gives.
	DegradeCache Degrade = "cache"
	// DegradeDefer: it runs later.
	DegradeDefer Degrade = "defer"
	// DegradeOff: there is no yellow; what is over the limit is refused.
	DegradeOff Degrade = "off"
)

// RouteKind says what passes on a route.
type RouteKind string

// The kinds.
const (
	HTTP RouteKind = "http"
	LLMs RouteKind = "llm"
)

// LLM is how the tokens of a call are reckoned before the upstream has counted them.
type LLM struct {
	// DefaultTokens are reserved for the answer of a call that names no bound; default 256.
	DefaultTokens int64 `json:"default_tokens,omitempty"`
	// MaxReserve caps what a call reserves, prompt and answer; default 1,024.
	MaxReserve int64 `json:"max_reserve,omitempty"`
	// InspectBytes is how much of a body is looked into; default 1 MiB.
	InspectBytes int64 `json:"inspect_bytes,omitempty"`
	// AddUsage asks for usage in streams whose clients do not, and removes it again; default true.
	AddUsage *bool `json:"add_usage,omitempty"`
}

// Profile is a way to use an LLM route. Its keys are spelled as in AIBrix' config profiles.
type Profile struct {
	// RoutingStrategy picks among an upstream's several URLs: least-request, round-robin or random; default round-robin.
	RoutingStrategy RoutingStrategy `json:"routingStrategy,omitempty"`
	// RequestsPerSecond bounds the calls of each model, of all clients together; 0: no bound.
	RequestsPerSecond int64 `json:"requestsPerSecond,omitempty"`
	// Models have a bound of their own in place of that.
	Models []ModelRate `json:"models,omitempty"`
}

// ModelRate is the bound of one model.
type ModelRate struct {
	Model             string `json:"model"`
	RequestsPerSecond int64  `json:"requestsPerSecond"`
}

// RoutingStrategy picks one of an upstream's URLs.
type RoutingStrategy string

// The strategies.
const (
	LeastRequest RoutingStrategy = "least-request"
	RoundRobin   RoutingStrategy = "round-robin"
	Random       RoutingStrategy = "random"
)

// HeaderFamily is a way to tell clients of their limits.
type HeaderFamily string

// The families. X-RateLimit-Tier, -Algorithm and the like belong to none of them and are always sent.
const (
	// RateLimitHeaders are RateLimit-Limit, -Remaining and -Reset, in seconds from now.
	RateLimitHeaders HeaderFamily = "ratelimit"
	// XRateLimitHeaders are X-RateLimit-Limit, -Remaining and -Reset, the last in Unix seconds.
	XRateLimitHeaders HeaderFamily = "x-ratelimit"
	// IETFHeaders are RateLimit-Policy and RateLimit of draft-ietf-httpapi-ratelimit-headers-10, with every limit of the client.
	IETFHeaders HeaderFamily = "ietf"
)

// CORS is which pages of other origins may call a route, and how.
type CORS struct {
	// AllowedOrigins are scheme://host[:port], with at most one *, or "*" for all.
	AllowedOrigins []string `json:"allowed_origins"`
	// AllowedMethods: default GET, HEAD, POST, PUT, PATCH, DELETE.
	AllowedMethods []string `json:"allowed_methods,omitempty"`
	// AllowedHeaders may hold "*"; default Accept, Authorization, Content-Type, X-API-Key, X-Requested-With.
	AllowedHeaders []string `json:"allowed_headers,omitempty"`
	// ExposeHeaders are the upstream's fields that pages may read; the edge's own are exposed besides.
	ExposeHeaders []string `json:"expose_headers,omitempty"`
	// AllowCredentials lets cookies and the like come along; not with the origin "*".
	AllowCredentials bool `json:"allow_credentials,omitempty"`
	// MaxAgeSeconds is how long browsers may keep the answer to a preflight; default 600.
	MaxAgeSeconds int64 `json:"max_age_seconds,omitempty"`
}

// Quota is what each client may spend on a route, in cost units. A token bucket
// needs capacity and refill_rate, a sliding window sliding_limit and window_seconds;
// both may be given, so that the algorithm can be switched. Without any, the route has no limit of its own.
type Quota struct {
	Capacity      int64   `json:"capacity,omitempty"`
	RefillRate    float64 `json:"refill_rate,omitempty"` // tokens per second
	SlidingLimit  int64   `json:"sliding_limit,omitempty"`
	WindowSeconds int64   `json:"window_seconds,omitempty"`
	// MaxDebt bounds how far a settlement may take the balance below zero, in tokens; default 10 × capacity.
	MaxDebt int64 `json:"max_debt,omitempty"`
}

// Plan limits a client over all routes together.
type Plan struct {
	// Rate is in tokens per second, Burst in tokens; both or neither ("unlimited").
	Rate  float64 `json:"rate,omitempty"`
	Burst int64   `json:"burst,omitempty"`
	// DailyQuota is in tokens per UTC day; 0 or absent: unlimited.
	DailyQuota int64 `json:"daily_quota,omitempty"`
	// RPM and TPM are calls and their tokens per minute over all LLM routes; 0 or absent: unlimited.
	RPM int64 `json:"rpm,omitempty"`
	TPM int64 `json:"tpm,omitempty"`
}

// User is a client known by its API keys.
type User struct {
	Plan string `json:"plan,omitempty"`
	// Admin exempts from every limit.
	Admin bool `json:"admin,omitempty"`
	// RPM and TPM are the user's own, each in place of the plan's.
	RPM int64 `json:"rpm,omitempty"`
	TPM int64 `json:"tpm,omitempty"`
	// KeyHashes are SHA-256 digests of the user's API keys, in hex. Keys themselves are never configured.
	KeyHashes []string `json:"key_hashes"`
}

// DefaultPlans are the plans that exist unless a policy redefines them.
func DefaultPlans() map[string]Plan {
	return map[string]Plan{
		"free":       {Rate: 10, Burst: 20, DailyQuota: 10_000},
		"starter":    {Rate: 50, Burst: 100, DailyQuota: 100_000},
		"growth":     {Rate: 200, Burst: 500, DailyQuota: 1_000_000},
		"enterprise": {Rate: 1000, Burst: 2000},
	}
}

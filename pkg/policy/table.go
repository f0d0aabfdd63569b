package policy

import "github.com/aegisrate/aegisrate/pkg/bucket"

// Rules is a route ready to decide by.
type Rules struct {
	Name      string
	Upstream  string
	Deny      bool
	Shadow    bool
	Algorithm bucket.Kind
	// Cost, MaxCost and CostPerSecond are in micro-tokens.
	Cost, MaxCost, CostPerSecond int64
	ExposeComputeCost            bool
	MaxBodyBytes                 int64

	// limits is what each plan's clients are held to; byUser has the users with an override of their own.
	limits map[string][]ScopedLimit
	byUser map[string][]ScopedLimit
}

// ScopedLimit is one limit of a client and the bucket it is kept in.
type ScopedLimit struct {
	// Scope is the route's name, bucket.ScopePlan or bucket.ScopeDay.
	Scope string
	bucket.Limit
	// Adaptive limits scale with the upstream's multiplier: a route's do, a plan's rate and daily quota never.
	Adaptive bool
}

// UserRules is a verified client.
type UserRules struct {
	Name  string
	Plan  string
	Admin bool
}

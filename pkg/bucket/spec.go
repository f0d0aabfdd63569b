package bucket

import (
	"errors"
	"fmt"
)

const (
	// One is a whole token in micro-tokens, and a multiplier of 1.
	One = 1_000_000
	// MaxTokens bounds capacities and limits, in whole tokens.
	MaxTokens = 100_000_000
	// MaxMicro is MaxTokens in micro-tokens; it bounds costs too.
	MaxMicro = MaxTokens * One
	// MaxRate bounds refill rates, in micro-tokens per second.
	MaxRate = MaxMicro
	// MaxDebt bounds how far below zero a balance can be settled, in micro-tokens.
	MaxDebt = 10 * MaxMicro
	// MaxWindow bounds a sliding window, in seconds.
	MaxWindow = 31 * 24 * 3600
	// FloorMultiplier is the least multiplier the system applies, in millionths.
	// A bucket's time to live assumes it, so that a later fall of M expires no debtor early.
	FloorMultiplier = 200_000
)

// Kind is the algorithm of a bucket.
type Kind string

const (
	TokenBucket   Kind = "token_bucket"
	SlidingWindow Kind = "sliding_window"
	DailyQuota    Kind = "daily_quota"
)

// Spec is one limit in effect: what remains of a configured limit once the
// multiplier is applied. Effective makes it.
type Spec struct {
	Kind Kind `json:"kind"`
	// Capacity is C_eff, L_eff or the day's quota, in micro-tokens; a whole number of tokens.
	Capacity int64 `json:"capacity"`
	// Rate is R_eff in micro-tokens per second; token bucket only.
	Rate int64 `json:"rate,omitempty"`
	// SlowestRate is the rate at FloorMultiplier; the time to live is reckoned by it. Token bucket only.
	SlowestRate int64 `json:"slowest_rate,omitempty"`
	// Window is the window's length in seconds; sliding window only.
	Window int64 `json:"window,omitempty"`
	// Grace is the grace buffer's size in micro-tokens; 0: the limit has no yellow.
	Grace int64 `json:"grace,omitempty"`
	// MaxDebt is how far below zero a settlement may go, in micro-tokens; what goes beyond is forgiven.
	MaxDebt int64 `json:"max_debt,omitempty"`
}

// Validate reports the first field out of range.
func (s Spec) Validate() error {
	if s.Capacity < One || s.Capacity > MaxMicro || s.Capacity%One != 0 {
		return fmt.Errorf("capacity %d: want whole tokens, 1 to %d", s.Capacity, MaxTokens)
	}
	if s.Grace < 0 || s.Grace > s.Capacity*6 || s.MaxDebt < 0 || s.MaxDebt > MaxDebt {
		return errors.New("grace or max_debt out of range")
	}
	switch s.Kind {
	case TokenBucket:
		if s.Rate < 1 || s.Rate > MaxRate || s.SlowestRate < 1 || s.SlowestRate > s.Rate {
			return fmt.Errorf("rate %d, slowest rate %d: want 1 ≤ slowest ≤ rate ≤ %d", s.Rate, s.SlowestRate, MaxRate)
		}
	case SlidingWindow:
		if s.Window < 1 || s.Window > MaxWindow {
			return fmt.Errorf("window %d: want 1 to %d seconds", s.Window, MaxWindow)
		}
	case DailyQuota:
	default:
		return fmt.Errorf("unknown kind %q", s.Kind)
	}
	return nil
}

// Limit is a limit as configured, before the multiplier.
type Limit struct {
	Kind Kind
	// Capacity is C, L or the quota, in whole tokens.
	Capacity int64
	// Rate is R in micro-tokens per second; token bucket only.
	Rate int64
	// Window is in seconds; sliding window only.
	Window int64
	// Grace says that yellow answers come from this limit: G = floor(0.2 × Capacity).
	Grace bool
	// MaxDebt is in micro-tokens; 0 means 10 × Capacity.
	MaxDebt int64
}

// Tier classifies a request (TECH.md of the seed, 2.1).
type Tier uint8

const (
	// Green: every limit has room; all are charged.
	Green Tier = iota
	// Yellow: the route's own limit lacks room and its grace covers it; only that limit is charged.
	Yellow
	// Red: refused; nothing is charged.
	Red
)

func (t Tier) String() string {
	switch t {
	case Green:
		return "green"
	case Yellow:
		return "yellow"
	default:
		return "red"
	}
}

// Scopes of buckets that belong to no route. Route names are [a-z0-9][a-z0-9_-]*, so these can't collide with one.
const (
	// ScopePlan is the client's rate over all routes.
	ScopePlan = "@plan"
	// ScopeDay is the client's daily quota.
	ScopeDay = "@day"
)

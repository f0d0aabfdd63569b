package policy

import (
	"fmt"
	"math"
	"strconv"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// bound is what a number may be. Units are the document's: tokens, seconds, milliseconds, shares of 1.
type bound struct {
	min, max float64
	// hint says what to write instead, where a 0 is likely meant to say something.
	hint string
}

const quotaHint = "to refuse every request set deny: true, for no limit leave the quota out"

const unlimitedHint = "for no limit leave it out"

// MaxPerWindow bounds what a fixed window counts: sums of many stay exact integers.
const MaxPerWindow = 1_000_000_000

// leastRate is a micro-token per second, and the least that a rate can be.
const leastRate = 1.0 / bucket.One

// bounds has every number of a policy by its key; no key has two meanings.
var bounds = map[string]bound{
	"timeout_seconds":         {min: 0.001, max: 3600},
	"connect_timeout_seconds": {min: 0.001, max: 60},
	"idle_timeout_seconds":    {min: 1, max: 3600},
	"max_connections":         {min: 1, max: 65_536},

	"slow_p95_ms":      {min: 1, max: 3_600_000},
	"fast_p95_ms":      {min: 1, max: 3_600_000},
	"error_rate":       {min: 0.001, max: 1},
	"clear_error_rate": {min: 0.001, max: 1},
	"floor":            {min: float64(bucket.FloorMultiplier) / bucket.One, max: 1},
	"decrease":         {min: 0.01, max: 0.99},
	"increase":         {min: 0.001, max: 1},
	"min_samples":      {min: 1, max: 1000},
	"window":           {min: 1, max: 1000},
	"max_age_seconds":  {min: 1, max: 3600},

	"cost":            {min: 0, max: bucket.MaxTokens},
	"max_cost":        {min: leastRate, max: bucket.MaxTokens},
	"cost_per_second": {min: 0, max: bucket.MaxTokens},
	"max_body_bytes":  {min: 1, max: 1 << 40},

	"max_stale_seconds": {min: 1, max: 7 * 24 * 3600},

	"lease_size":    {min: 0, max: 1_000_000},
	"lease_seconds": {min: 0.1, max: 60, hint: "for no leases set lease_size: 0"},

	"capacity":       {min: 1, max: bucket.MaxTokens, hint: quotaHint},
	"refill_rate":    {min: leastRate, max: bucket.MaxTokens, hint: quotaHint},
	"sliding_limit":  {min: 1, max: bucket.MaxTokens, hint: quotaHint},
	"window_seconds": {min: 1, max: bucket.MaxWindow, hint: quotaHint},
	"max_debt":       {min: 1, max: bucket.MaxDebt / bucket.One, hint: "for the default, 10 × the limit, leave it out"},

	"rate":        {min: leastRate, max: bucket.MaxTokens, hint: "for an unlimited rate leave rate and burst out"},
	"burst":       {min: 1, max: bucket.MaxTokens, hint: "for an unlimited rate leave rate and burst out"},
	"daily_quota": {min: 0, max: bucket.MaxTokens},

	"rpm":               {min: 1, max: MaxPerWindow, hint: unlimitedHint},
	"tpm":               {min: 1, max: MaxPerWindow, hint: unlimitedHint},
	"requestsPerSecond": {min: 1, max: MaxPerWindow, hint: unlimitedHint},
	"default_tokens":    {min: 1, max: MaxPerWindow},
	"max_reserve":       {min: 1, max: MaxPerWindow},
	"inspect_bytes":     {min: 1 << 10, max: 16 << 20},
}

// problem says why x is out of bounds, or "". The zero bound takes every finite number; what has it is
// checked by whoever asked for it.
func (b bound) problem(x float64) string {
	if b == (bound{}) && !math.IsNaN(x) && !math.IsInf(x, 0) || x >= b.min && x <= b.max { // false for NaN too
		return ""
	}
	if b == (bound{}) {
		return "must be a finite number"
	}
	p := fmt.Sprintf("must be a number from %s to %s", decimal(b.min), decimal(b.max))
	if b.hint != "" {
		p += "; " + b.hint
	}
	return p
}

// decimal writes x without an exponent.
func decimal(x float64) string {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return strconv.FormatFloat(x, 'g', -1, 64)
	}
	return strconv.FormatFloat(x, 'f', -1, 64)
}

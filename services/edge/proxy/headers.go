package proxy

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// Headers of the edge, in the canonical form of net/http.
const (
	headerRequestID   = "X-Request-Id"
	headerComputeCost = "X-Compute-Cost"

	headerLimit      = "Ratelimit-Limit"
	headerRemaining  = "Ratelimit-Remaining"
	headerReset      = "Ratelimit-Reset"
	headerXLimit     = "X-Ratelimit-Limit"
	headerXRemaining = "X-Ratelimit-Remaining"
	headerXReset     = "X-Ratelimit-Reset"
	headerPolicy     = "Ratelimit-Policy"
	headerState      = "Ratelimit"
	headerRetryAfter = "Retry-After"
	headerTier       = "X-Ratelimit-Tier"
	headerAlgorithm  = "X-Ratelimit-Algorithm"
	headerMultiplier = "X-Ratelimit-Adaptive-Multiplier"
	headerShadow     = "X-Ratelimit-Shadow-Exceeded"
	// headerExempt says why no limit applies: "admin".
	headerExempt = "X-Ratelimit-Exempt"
	// headerDegraded is "true" while this edge decides without the shared store.
	headerDegraded    = "X-Ratelimit-Degraded"
	headerDegradation = "X-Graceful-Degradation"
)

// ours are the prefixes of header names that only the edge may set.
var ours = []string{"Ratelimit", "X-Ratelimit-", "X-Edge-", headerComputeCost, headerDegradation}

// asTyped keeps net/http from guessing a Content-Type for an answer, of header from, that has none.
func asTyped(h, from http.Header) {
	if len(from["Content-Type"]) == 0 {
		h["Content-Type"] = nil
	}
}

// stripOurs removes what only the edge may say.
func stripOurs(h http.Header) {
	for name := range h {
		if isOurs(name) {
			delete(h, name)
		}
	}
}

func isOurs(name string) bool {
	for _, prefix := range ours {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// told are the documented names of all headers that tell of limits.
var told = []string{
	"RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset",
	"RateLimit-Policy", "RateLimit", "X-RateLimit-Tier", "X-RateLimit-Algorithm",
	"X-RateLimit-Adaptive-Multiplier", "X-RateLimit-Shadow-Exceeded", "X-RateLimit-Exempt", "X-RateLimit-Degraded",
	"x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
	"x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens",
}

// spelled is how the documentation spells our names where net/http's canonical form differs.
// Readers must not care, but people and their scripts do.
var spelled = func() map[string]string {
	names := map[string]string{}
	for _, name := range told {
		names[http.CanonicalHeaderKey(name)] = name
	}
	return names
}()

// spell gives our names the documented spelling; HTTP/1.1 sends them so.
func spell(h http.Header) {
	for canonical, v := range h {
		if !isOurs(canonical) {
			continue
		}
		if name, ok := spelled[canonical]; ok && name != canonical {
			delete(h, canonical)
			h[name] = v
		}
	}
}

// fields sets header fields, a single line each, as documented. One slice holds the values of all.
type fields struct {
	http.Header
	values []string
}

func (f *fields) set(name, value string) {
	if as, ok := spelled[name]; ok {
		name = as
	}
	f.values = append(f.values, value)
	n := len(f.values)
	f.Header[name] = f.values[n-1 : n : n]
}

// setDecision tells the client how it was decided.
func setDecision(h http.Header, d *admission.Decision) {
	if d.Route == nil || len(d.Upstream.URLs) == 0 {
		return // refused before any limit was looked at
	}
	f := fields{h, make([]string, 0, 8)}
	if d.Exempt {
		f.set(headerExempt, "admin")
		return
	}
	if d.Known {
		for _, family := range d.Route.Headers {
			setLimit(&f, family, d)
		}
	}
	if d.RetryAfter > 0 {
		f.set(headerRetryAfter, strconv.FormatInt(d.RetryAfter, 10))
	}
	f.set(headerTier, d.Tier.String())
	f.set(headerAlgorithm, string(d.Route.Algorithm))
	f.set(headerMultiplier, decimal(d.Multiplier))
	if d.ShadowExceeded {
		f.set(headerShadow, "true")
	}
	if d.Degraded {
		f.set(headerDegraded, "true")
	}
}

// setLimit tells of the limit that decided, or of all of them, in the terms of one family.
func setLimit(f *fields, family policy.HeaderFamily, d *admission.Decision) {
	switch family {
	case policy.RateLimitHeaders:
		f.set(headerLimit, strconv.FormatInt(d.Limit, 10))
		f.set(headerRemaining, strconv.FormatInt(d.Remaining, 10))
		f.set(headerReset, strconv.FormatInt(d.Reset, 10))
	case policy.XRateLimitHeaders:
		f.set(headerXLimit, strconv.FormatInt(d.Limit, 10))
		f.set(headerXRemaining, strconv.FormatInt(d.Remaining, 10))
		f.set(headerXReset, strconv.FormatInt(d.ResetAt, 10))
	case policy.IETFHeaders:
		var quotas, states []byte
		views := d.Limits()
		if len(views) == 0 {
			return
		}
		partition := partitionKey(d.Client.ID)
		for i, l := range views {
			if i > 0 {
				quotas, states = append(quotas, ", "...), append(states, ", "...)
			}
			// A policy's names need no escape in a structured field's string.
			quotas = fmt.Appendf(quotas, `"%s";q=%d;w=%d;pk=:%s:`, l.Name, l.Quota, l.Window, partition)
			states = fmt.Appendf(states, `"%s";r=%d;t=%d;pk=:%s:`, l.Name, l.Remaining, l.Next, partition)
		}
		f.set(headerPolicy, string(quotas))
		f.set(headerState, string(states))
	}
}

// partitionKey tells a client which of the quotas that it may be counted by it was counted by: its user's or
// its address's. It says so without naming them.
func partitionKey(client string) string {
	sum := sha256.Sum256([]byte(client))
	return base64.StdEncoding.EncodeToString(sum[:9])
}

// decimal writes millionths with one digit after the point at the least: 1.0, 0.85.
func decimal(millionths int64) string {
	if millionths == bucket.One {
		return "1.0" // nearly always
	}
	s := strconv.FormatFloat(float64(millionths)/bucket.One, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

// maxComputeCost bounds what is kept of an X-Compute-Cost, in bytes. Every cost that
// is believed is shorter, so what was cut stays unbelievable.
const maxComputeCost = 64

// computeCost is the upstream's X-Compute-Cost as it came. Several lines give a text that is no number.
func computeCost(h http.Header) string {
	cost := strings.Join(h.Values(headerComputeCost), ", ")
	return cost[:min(len(cost), maxComputeCost)]
}

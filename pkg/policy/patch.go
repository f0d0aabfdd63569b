package policy

import (
	"slices"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// change is what Patch reads: the switches and quotas that may change at run time. A nil field stays as it is.
type change struct {
	Algorithm  *bucket.Kind           `json:"algorithm"`
	ShadowMode *bool                  `json:"shadow_mode"`
	Routes     map[string]routeChange `json:"routes"`
}

type routeChange struct {
	Algorithm     *bucket.Kind `json:"algorithm"`
	ShadowMode    *bool        `json:"shadow_mode"`
	Capacity      *int64       `json:"capacity"`
	RefillRate    *float64     `json:"refill_rate"`
	SlidingLimit  *int64       `json:"sliding_limit"`
	WindowSeconds *int64       `json:"window_seconds"`
	MaxDebt       *int64       `json:"max_debt"`
}

// Patch applies an administrator's change: a JSON object with any of
// "algorithm", "shadow_mode" and "routes", the latter naming existing routes
// with any of a quota's fields, "algorithm" and "shadow_mode". It is applied
// whole or not at all, and p stays as it is. changed lists the paths whose
// value is another now, sorted; it is empty for a change that changes nothing.
// Its error is Errors.
func Patch(p Policy, patch []byte) (next Policy, changed []string, err error) {
	root, err := readJSON(patch)
	if err != nil {
		return Policy{}, nil, err
	}
	var c change
	var d decoder
	if err := d.decode(root, &c); err != nil {
		return Policy{}, nil, err
	}

	next = p.withDefaults() // its maps are next's own
	a := applier{}
	set(&a, "algorithm", &next.Algorithm, c.Algorithm)
	set(&a, "shadow_mode", &next.ShadowMode, c.ShadowMode)
	for _, name := range sortedKeys(c.Routes) {
		at := join("routes", name)
		r, exists := next.Routes[name]
		if !exists {
			a.errs.add(at, 0, "there is no such route; the routes are %s", list(next.Routes))
			continue
		}
		rc := c.Routes[name]
		set(&a, join(at, "algorithm"), &r.Algorithm, rc.Algorithm)
		set(&a, join(at, "capacity"), &r.Capacity, rc.Capacity)
		set(&a, join(at, "max_debt"), &r.MaxDebt, rc.MaxDebt)
		set(&a, join(at, "refill_rate"), &r.RefillRate, rc.RefillRate)
		if s := rc.ShadowMode; s != nil && (r.ShadowMode == nil || *r.ShadowMode != *s) {
			r.ShadowMode = s
			a.changed = append(a.changed, join(at, "shadow_mode"))
		}
		set(&a, join(at, "sliding_limit"), &r.SlidingLimit, rc.SlidingLimit)
		set(&a, join(at, "window_seconds"), &r.WindowSeconds, rc.WindowSeconds)
		next.Routes[name] = r
	}
	if err := a.errs.err(); err != nil {
		return Policy{}, nil, locate(err, root)
	}
	if err := next.Validate(); err != nil {
		return Policy{}, nil, locate(err, root)
	}
	slices.Sort(a.changed)
	return next, a.changed, nil
}

// applier collects what a change did.
type applier struct {
	changed []string
	errs    Errors
}

// set gives a field its new value, if there is one.
func set[T comparable](a *applier, path string, field *T, to *T) {
	if to != nil && *to != *field {
		*field = *to
		a.changed = append(a.changed, path)
	}
}

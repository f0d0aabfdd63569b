package admission

import (
	"sync/atomic"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// Refusal is a limit that is kept elsewhere and is exceeded, in its own units.
type Refusal struct {
	LimitView
	// Reset and RetryAfter are in seconds, at least 1.
	Reset, RetryAfter int64
}

// Refuse turns a decision to forward into a refusal by a limit that is kept elsewhere. What it was charged
// here is given back by the settler. It takes the place of Finish; id is the request's.
func (e *Engine) Refuse(d *Decision, id string, r Refusal) {
	if len(d.charges) > 0 {
		e.Sink.Add(d.record(Facts{ID: id, Outcome: events.OutcomeRefused}))
		d.charges = nil
	}
	takeBack(&e.tiers[d.Tier])
	e.tiers[bucket.Red].Add(1)
	d.Action, d.Tier, d.Known, d.refusal = Deny, bucket.Red, true, &r
	d.LimitName, d.Limit, d.Remaining, d.Reset, d.RetryAfter = r.Name, r.Quota, r.Remaining, r.Reset, r.RetryAfter
	d.ResetAt = seconds(d.time) + d.Reset
}

// takeBack takes one from a count that may have been taken out meanwhile.
func takeBack(n *atomic.Uint64) {
	for {
		if have := n.Load(); have == 0 || n.CompareAndSwap(have, have-1) {
			return
		}
	}
}

// LLMQuota is the client's requests and tokens per minute on LLM routes; 0: unlimited, as for admins.
func (d *Decision) LLMQuota() (rpm, tpm int64) {
	if d.Exempt {
		return 0, 0
	}
	return d.table.LLMQuota(d.Client.User, d.Client.Known)
}

// Profile is the profile of that name in the policy decided by.
func (d *Decision) Profile(name string) (policy.Profile, bool) { return d.table.Profile(name) }

package events

import (
	"errors"
	"fmt"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// ResponseBatch carries the facts of requests that one edge finished.
//
// N counts the batches of a boot from 1 without a gap; together with Boot it
// names the batch for ever, so a batch that is published twice is settled once.
type ResponseBatch struct {
	// Boot names one incarnation of an edge, Edge the replica it belongs to.
	Boot string `json:"boot"`
	Edge string `json:"edge"`
	N    uint64 `json:"n"`
	// Specs are the limits in force when the events were charged; Charge.Spec is an index into it.
	Specs  []bucket.Spec `json:"specs,omitempty"`
	Events []Response    `json:"events"`
}

// Response is one finished request, as seen by the edge that served it.
type Response struct {
	// ID is the request id that the client and the log see too.
	ID string `json:"id"`
	// Time is when the request was admitted, in Unix microseconds of the store's clock
	// (of the edge's, where the store was away).
	Time int64 `json:"time"`
	// Client is the client id; never a raw API key.
	Client   string `json:"client"`
	Route    string `json:"route"`
	Upstream string `json:"upstream"`
	// Config is the config version the edge decided by.
	Config uint64 `json:"config"`
	// Base is the cost charged on admission, in micro-tokens.
	Base    int64    `json:"base"`
	Charges []Charge `json:"charges,omitempty"`
	// ComputeCost is the upstream's X-Compute-Cost as received: "" where there was none
	// or the upstream is not trusted to set it.
	ComputeCost string `json:"compute_cost,omitempty"`
	// LatencyRate prices a second of Duration in micro-tokens, where the route does so; else 0.
	LatencyRate int64 `json:"latency_rate,omitempty"`
	// MaxCost caps the settled cost, in micro-tokens; an X-Compute-Cost above it is not believed.
	MaxCost int64 `json:"max_cost,omitempty"`
	// Status is the upstream's status, 0 where none came.
	Status int `json:"status,omitempty"`
	// Latency is the time to the upstream's response head, Duration to its last byte; microseconds.
	Latency  int64   `json:"latency"`
	Duration int64   `json:"duration"`
	Outcome  Outcome `json:"outcome"`
	// Refund says that nothing is owed: what was charged goes back. The route chooses for which
	// requests without an answer.
	Refund bool `json:"refund,omitempty"`
}

// Charge is what one bucket paid on admission.
type Charge struct {
	// Scope is the bucket's scope (a route's name, bucket.ScopePlan or bucket.ScopeDay).
	Scope string `json:"scope"`
	// Spec is an index into ResponseBatch.Specs.
	Spec int `json:"spec"`
	// Amount is what was taken, in micro-tokens; less than Base for a shadow pass.
	Amount int64 `json:"amount"`
	// Window is the window index (sliding window) or the UTC day number (daily quota) charged.
	Window int64 `json:"window,omitempty"`
	How    How   `json:"how"`
}

// How says how sure it is that the store took the charge.
type How string

const (
	// HowRedis: the store answered that it took the charge.
	HowRedis How = "redis"
	// HowUnknown: the call timed out and may have run; it counts as taken.
	HowUnknown How = "unknown"
	// HowLocal: the store was away and a local bucket admitted; settlement takes base and delta.
	HowLocal How = "local"
)

// Outcome says how a request ended.
type Outcome string

const (
	// OutcomeOK: the upstream answered and the answer was passed on whole.
	OutcomeOK Outcome = "ok"
	// OutcomeUnreached: no byte reached the upstream (refused, unresolved, dial timeout).
	OutcomeUnreached Outcome = "unreached"
	// OutcomeTimeout: the upstream did not answer within the deadline.
	OutcomeTimeout Outcome = "timeout"
	// OutcomeReset: the upstream broke off after it had been sent the request.
	OutcomeReset Outcome = "reset"
	// OutcomeAborted: the client went away before the answer was whole.
	OutcomeAborted Outcome = "aborted"
	// OutcomeRefused: a limit that is kept elsewhere refused it after it was charged; the upstream never knew.
	OutcomeRefused Outcome = "refused"
)

func (ResponseBatch) wireType() string { return "aegis.response.v1" }

func (b ResponseBatch) valid() error {
	if b.Boot == "" || b.N == 0 {
		return errors.New("boot and n must be set")
	}
	for i, s := range b.Specs {
		if err := s.Validate(); err != nil {
			return fmt.Errorf("specs[%d]: %w", i, err)
		}
	}
	for i, e := range b.Events {
		if err := e.valid(len(b.Specs)); err != nil {
			return fmt.Errorf("events[%d]: %w", i, err)
		}
	}
	return nil
}

func (e Response) valid(specs int) error {
	if e.ID == "" || e.Client == "" {
		return errors.New("id and client must be set")
	}
	if e.Time <= 0 || e.Base < 0 || e.Base > bucket.MaxMicro || e.LatencyRate < 0 || e.MaxCost < 0 || e.Duration < 0 || e.Latency < 0 {
		return errors.New("time must be positive, base, rates and durations not negative")
	}
	switch e.Outcome {
	case OutcomeOK, OutcomeUnreached, OutcomeTimeout, OutcomeReset, OutcomeAborted, OutcomeRefused:
	default:
		return fmt.Errorf("unknown outcome %q", e.Outcome)
	}
	for i, c := range e.Charges {
		if c.Spec < 0 || c.Spec >= specs || c.Scope == "" || c.Amount < 0 || c.Amount > bucket.MaxMicro {
			return fmt.Errorf("charges[%d]: spec, scope or amount out of range", i)
		}
		switch c.How {
		case HowRedis, HowUnknown, HowLocal:
		default:
			return fmt.Errorf("charges[%d]: unknown how %q", i, c.How)
		}
	}
	return nil
}

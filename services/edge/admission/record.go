package admission

import (
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// Facts is how a forwarded request ended.
type Facts struct {
	// ID is the request id.
	ID string
	// ComputeCost is the upstream's X-Compute-Cost as received.
	ComputeCost string
	// Status is the upstream's, 0 where none came.
	Status int
	// Latency is the time to the response head, Duration to the last byte.
	Latency, Duration time.Duration
	Outcome           events.Outcome
	// Unanswered: no byte of an answer came from the upstream.
	Unanswered bool
}

// Record is a finished request on its way to the event log. Its charges number Specs;
// EncodeBatch renumbers them.
type Record struct {
	Response events.Response
	Specs    []bucket.Spec
}

func (d *Decision) record(f Facts) Record {
	r := Record{Response: events.Response{
		ID:          f.ID,
		Time:        d.time,
		Client:      d.Client.ID,
		Route:       d.Route.Name,
		Upstream:    d.Route.Upstream,
		Config:      d.Config,
		LatencyRate: d.Route.CostPerSecond,
		MaxCost:     d.Route.MaxCost,
		Status:      f.Status,
		Latency:     f.Latency.Microseconds(),
		Duration:    f.Duration.Microseconds(),
		Outcome:     f.Outcome,
	}}
	r.Response.Refund = f.Outcome == events.OutcomeRefused || f.Unanswered && d.Route.Refunds(policy.Refund(f.Outcome))
	if d.Upstream.TrustComputeCost {
		r.Response.ComputeCost = f.ComputeCost
	}
	if len(d.charges) == 0 {
		return r
	}
	r.Response.Base = d.Route.Cost
	r.Response.Charges = make([]events.Charge, len(d.charges))
	r.Specs = make([]bucket.Spec, len(d.charges))
	for i, c := range d.charges {
		r.Specs[i] = c.spec
		r.Response.Charges[i] = events.Charge{Scope: c.scope, Spec: i, Amount: c.amount, Window: c.window, How: c.how}
	}
	return r
}

// EncodeBatch gives the wire form of the n-th batch of an edge's boot, in which each spec stands once.
func EncodeBatch(edge, boot string, n uint64, records []Record) ([]byte, error) {
	batch := events.ResponseBatch{Boot: boot, Edge: edge, N: n, Events: make([]events.Response, len(records))}
	index := make(map[bucket.Spec]int)
	for i, r := range records {
		e := r.Response
		e.Charges = make([]events.Charge, len(r.Response.Charges)) // the record may be encoded again
		for j, c := range r.Response.Charges {
			spec := r.Specs[c.Spec]
			at, ok := index[spec]
			if !ok {
				at = len(batch.Specs)
				index[spec] = at
				batch.Specs = append(batch.Specs, spec)
			}
			c.Spec = at
			e.Charges[j] = c
		}
		batch.Events[i] = e
	}
	return events.Encode(batch)
}

package events

import "errors"

// Heartbeat says that an edge is alive and what it did since its last beat.
type Heartbeat struct {
	Edge string `json:"edge"`
	Boot string `json:"boot"`
	// Config is the config version the edge obeys.
	Config uint64 `json:"config"`
	// Degraded is true while the edge decides from local buckets.
	Degraded bool `json:"degraded"`
	// Requests by tier since the last beat.
	Green  uint64 `json:"green"`
	Yellow uint64 `json:"yellow"`
	Red    uint64 `json:"red"`
	// Queued events wait for the event log; Lost ones exceeded its bound since boot.
	Queued int    `json:"queued"`
	Lost   uint64 `json:"lost"`
	// Leaving is true on the last beat of a clean shutdown.
	Leaving bool `json:"leaving,omitempty"`
}

func (Heartbeat) wireType() string { return "aegis.heartbeat.v1" }

func (h Heartbeat) valid() error {
	if h.Edge == "" || h.Boot == "" {
		return errors.New("edge and boot must be set")
	}
	return nil
}

package events

import "errors"

// Health is one tick of an upstream's health, published by whichever
// healthwatch replica computed it first.
type Health struct {
	Upstream string `json:"upstream"`
	// Tick counts the ticks of this upstream; it never regresses.
	Tick uint64 `json:"tick"`
	// Multiplier is M in millionths, in [1, bucket.One].
	Multiplier int64 `json:"multiplier"`
	// P95 is the nearest-rank 95th percentile latency in microseconds, 0 without samples.
	P95 int64 `json:"p95"`
	// ErrorRate is the share of 5xx and failed requests, in millionths.
	ErrorRate int64 `json:"error_rate"`
	Samples   int   `json:"samples"`
	// By names the replica that computed the tick.
	By string `json:"by"`
}

func (Health) wireType() string { return "aegis.health.v1" }

func (h Health) valid() error {
	if h.Upstream == "" || h.Tick == 0 {
		return errors.New("upstream and tick must be set")
	}
	if h.Multiplier < 1 || h.Multiplier > 1_000_000 || h.P95 < 0 || h.ErrorRate < 0 || h.ErrorRate > 1_000_000 || h.Samples < 0 {
		return errors.New("a figure is out of range")
	}
	return nil
}

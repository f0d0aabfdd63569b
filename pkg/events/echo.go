package events

import "errors"

// Echo is what an edge tells itself.
type Echo struct {
	// N counts the edge's echoes, from 1.
	N uint64 `json:"n"`
	// Sent is when it was sent, in microseconds of a clock of the edge's own.
	Sent int64 `json:"sent"`
}

func (Echo) wireType() string { return "aegis.echo.v1" }

func (e Echo) valid() error {
	if e.N == 0 {
		return errors.New("n must be set")
	}
	return nil
}

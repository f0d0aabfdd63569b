package events

import (
	"errors"
	"fmt"
)

// Deferral is what has become of a Deferred.
type Deferral struct {
	ID     string `json:"id"`
	Client string `json:"client"`
	Route  string `json:"route"`
	// Seq is the sequence of the one Deferred that counts, in AEGIS_DEFERRED.
	Seq uint64 `json:"seq"`
	// Time is when the request was stored, Unix microseconds.
	Time  int64         `json:"time"`
	State DeferralState `json:"state"`
	// Once: it came with an idempotency key, and runs at most once. Digest tells what was asked with that key.
	Once   bool   `json:"once,omitempty"`
	Digest []byte `json:"digest,omitempty"`
	// Reason is why it failed.
	Reason string `json:"reason,omitempty"`
	// Result is the answer in the edges' own form, base64 in JSON; encrypted where Sealed.
	Result []byte `json:"result,omitempty"`
	Sealed bool   `json:"sealed,omitempty"`
}

// DeferralState is how far a deferred request is.
type DeferralState string

const (
	// DeferralQueued: it waits for its turn.
	DeferralQueued DeferralState = "queued"
	// DeferralRunning: an edge runs it, or died running it.
	DeferralRunning DeferralState = "running"
	// DeferralDone: it ran, and Result is the answer.
	DeferralDone DeferralState = "done"
	// DeferralFailed: it will not run any more, for Reason.
	DeferralFailed DeferralState = "failed"
	// DeferralCancelled: its client took it back before it ran.
	DeferralCancelled DeferralState = "cancelled"
)

func (Deferral) wireType() string { return "aegis.deferral.v1" }

func (d Deferral) valid() error {
	if d.ID == "" || d.Client == "" || d.Seq == 0 || d.Time <= 0 {
		return errors.New("id, client, seq and time must be set")
	}
	switch d.State {
	case DeferralQueued, DeferralRunning, DeferralDone, DeferralFailed, DeferralCancelled:
		return nil
	}
	return fmt.Errorf("unknown state %q", d.State)
}

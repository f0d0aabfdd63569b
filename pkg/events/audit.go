package events

import (
	"errors"
	"time"
)

// Audit is an admin operation or a failed attempt at one.
type Audit struct {
	Time time.Time `json:"time"`
	// Action is what was tried, for instance "config.change".
	Action string `json:"action"`
	// By names the caller as far as it is known (an address, a NATS user); Via is "http", "nats" or "websocket".
	By  string `json:"by"`
	Via string `json:"via"`
	// Result is "ok", "unauthenticated", "throttled", "refused" or "conflict"; Detail says more, never a secret.
	Result string `json:"result"`
	Detail string `json:"detail,omitempty"`
	// Target is what it was done to, such as "user:ann". Actor and Reason are who and why in the
	// caller's own words; the token alone proves nothing about them.
	Target string `json:"target,omitempty"`
	Actor  string `json:"actor,omitempty"`
	Reason string `json:"reason,omitempty"`
}

func (Audit) wireType() string { return "aegis.audit.v1" }

func (a Audit) valid() error {
	if a.Action == "" || a.Result == "" {
		return errors.New("action and result must be set")
	}
	return nil
}

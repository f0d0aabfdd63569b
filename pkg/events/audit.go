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
	// By names the caller as far as it is known (an address, a NATS user); Via is "http" or "nats".
	By  string `json:"by"`
	Via string `json:"via"`
	// Result is "ok", "unauthenticated", "throttled", "refused" or "conflict"; Detail says more, never a secret.
	Result string `json:"result"`
	Detail string `json:"detail,omitempty"`
}

func (Audit) wireType() string { return "aegis.audit.v1" }

func (a Audit) valid() error {
	if a.Action == "" || a.Result == "" {
		return errors.New("action and result must be set")
	}
	return nil
}

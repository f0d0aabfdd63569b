package events

import "errors"

// Deferred is a request that was answered 202 and runs later.
type Deferred struct {
	ID string `json:"id"`
	// Client is the client id; never a raw API key.
	Client string `json:"client"`
	// Request is the request in the edges' own form, base64 in JSON; encrypted where Sealed.
	Request []byte `json:"request"`
	Sealed  bool   `json:"sealed,omitempty"`
}

func (Deferred) wireType() string { return "aegis.deferred.v1" }

func (d Deferred) valid() error {
	if d.ID == "" || d.Client == "" || len(d.Request) == 0 {
		return errors.New("id, client and request must be set")
	}
	return nil
}

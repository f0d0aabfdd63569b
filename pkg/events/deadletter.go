package events

import "errors"

// DeadLetter is a message that a service could not parse or apply.
type DeadLetter struct {
	// Stream and Seq say where the message stood; Subject what it was published to.
	Stream  string `json:"stream"`
	Seq     uint64 `json:"seq"`
	Subject string `json:"subject"`
	Reason  string `json:"reason"`
	// Data is the message as it was, base64 in JSON.
	Data []byte `json:"data"`
}

func (DeadLetter) wireType() string { return "aegis.deadletter.v1" }

func (d DeadLetter) valid() error {
	if d.Stream == "" || d.Seq == 0 || d.Reason == "" {
		return errors.New("stream, seq and reason must be set")
	}
	return nil
}

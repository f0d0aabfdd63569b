package events

import (
	"encoding/json"
	"errors"
	"fmt"
)

// ErrType reports a message of another type or version than the reader expects.
var ErrType = errors.New("events: unexpected message type")

// ErrMalformed reports a message that is not the JSON its type promises.
var ErrMalformed = errors.New("events: malformed message")

// message is what every wire form in this package implements.
type message interface {
	// wireType is the "type" the message travels under.
	wireType() string
	// valid reports the first field that breaks the form, or nil.
	valid() error
}

// Encode gives the wire form of m, with its type.
func Encode[M message](m M) ([]byte, error) {
	if err := m.valid(); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrMalformed, m.wireType(), err)
	}
	body, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrMalformed, m.wireType(), err)
	}
	head := []byte(`{"type":"` + m.wireType() + `"`)
	if len(body) > 2 {
		head = append(head, ',')
	}
	return append(head, body[1:]...), nil
}

// Decode reads a message of type M. Its error is ErrType or ErrMalformed.
func Decode[M message](data []byte) (M, error) {
	var wire struct {
		Type string `json:"type"`
	}
	var m M
	if err := json.Unmarshal(data, &wire); err != nil {
		return m, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if wire.Type != m.wireType() {
		return m, fmt.Errorf("%w: got %q, want %q", ErrType, wire.Type, m.wireType())
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return m, fmt.Errorf("%w: %s: %w", ErrMalformed, m.wireType(), err)
	}
	if err := m.valid(); err != nil {
		return m, fmt.Errorf("%w: %s: %w", ErrMalformed, m.wireType(), err)
	}
	return m, nil
}

package bus

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// What an operation can fail with. Except for ErrUnavailable, each says that
// nothing was stored.
var (
	// ErrConflict: the stream moved on; the expected last sequence no longer holds.
	ErrConflict = errors.New("bus: expected last sequence does not hold")
	// ErrNoStream: no stream takes this subject or has this name, or JetStream is not up yet.
	ErrNoStream = errors.New("bus: no such stream")
	// ErrNotFound: the stream has no such message.
	ErrNotFound = errors.New("bus: no such message")
	// ErrFull: the stream, or the disk under it, takes no more.
	ErrFull = errors.New("bus: the stream is full")
	// ErrTooLarge: the message exceeds what the server or the stream takes.
	ErrTooLarge = errors.New("bus: message too large")
	// ErrDenied: the permissions of this NATS user refuse the subject.
	ErrDenied = errors.New("bus: denied by the permissions of the NATS user")
	// ErrUnavailable: no answer came, or no connection was there; a publish may
	// or may not have been stored.
	ErrUnavailable = errors.New("bus: unavailable")
	// ErrStreamReset: the stream is not the one that was followed so far; it was
	// deleted and made anew, or lost its tail.
	ErrStreamReset = errors.New("bus: the stream was reset")
)

// Server error codes that nats.go gives no name.
const (
	codeStoreFailed       = jetstream.ErrorCode(10077)
	codeNoResources       = jetstream.ErrorCode(10023)
	codeStorageExceeded   = jetstream.ErrorCode(10047)
	codeMemoryExceeded    = jetstream.ErrorCode(10028)
	codeMaxMessageDefault = jetstream.JSErrCodeStreamMessageExceedsMaximum
)

// classify wraps err in the error of this package that it stands for. ctx is
// the context the operation ran under, from calls.begin.
func classify(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); errors.Is(cause, ErrDenied) || errors.Is(cause, ErrUnavailable) {
		return cause
	}
	kind := ErrUnavailable
	var api *jetstream.APIError
	switch {
	case errors.As(err, &api):
		switch api.ErrorCode {
		case jetstream.JSErrCodeStreamWrongLastSequence, jetstream.JSErrCodeStreamWrongLastSequenceConstant:
			kind = ErrConflict
		case jetstream.JSErrCodeStreamNotFound:
			kind = ErrNoStream
		case jetstream.JSErrCodeMessageNotFound:
			kind = ErrNotFound
		case codeStoreFailed, codeNoResources, codeStorageExceeded, codeMemoryExceeded:
			kind = ErrFull
		case codeMaxMessageDefault:
			kind = ErrTooLarge
		}
	case errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, jetstream.ErrNoStreamResponse):
		kind = ErrNoStream
	case errors.Is(err, jetstream.ErrMsgNotFound):
		kind = ErrNotFound
	case errors.Is(err, nats.ErrMaxPayload):
		kind = ErrTooLarge
	}
	return fmt.Errorf("%w: %w", kind, err)
}

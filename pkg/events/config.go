package events

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

// ConfigVersion is one whole, validated version of the policy.
type ConfigVersion struct {
	// Version counts from 1; it is the message's sequence in AEGIS_CONFIG.
	Version uint64 `json:"version"`
	// By says who made the change, Via how it came ("http", "nats", "websocket", "file").
	By   string    `json:"by"`
	Via  string    `json:"via"`
	Time time.Time `json:"time"`
	// Actor and Reason are who and why in the caller's own words.
	Actor  string `json:"actor,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Document is the policy as package policy encodes it.
	Document json.RawMessage `json:"document"`
}

func (ConfigVersion) wireType() string { return "aegis.config.v1" }

func (c ConfigVersion) valid() error {
	if c.Version == 0 || len(c.Document) == 0 {
		return errors.New("version and document must be set")
	}
	return nil
}

// DecodeConfig reads the version that stands at seq in AEGIS_CONFIG. One that gives itself
// another number is malformed: taken for the newest, it would outlive every true one after it.
func DecodeConfig(data []byte, seq uint64) (ConfigVersion, error) {
	v, err := Decode[ConfigVersion](data)
	if err == nil && v.Version != seq {
		err = fmt.Errorf("%w: it calls itself version %d but stands at sequence %d", ErrMalformed, v.Version, seq)
	}
	return v, err
}

// ConfigReply answers a change request, over NATS and HTTP alike.
type ConfigReply struct {
	// Version is the version in force after the request.
	Version uint64 `json:"version"`
	// Changed lists the paths whose value the request changed; empty for a no-op.
	Changed []string `json:"changed"`
	// Diff is what the request changed, or with DryRun would have changed: nothing was stored then.
	Diff   []policy.Difference `json:"diff"`
	DryRun bool                `json:"dry_run,omitempty"`
}

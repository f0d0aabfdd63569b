package events

import (
	"encoding/json"
	"errors"
	"time"
)

// ConfigVersion is one whole, validated version of the policy.
type ConfigVersion struct {
	// Version counts from 1; it is the message's sequence in AEGIS_CONFIG as long as that stream lives.
	Version uint64 `json:"version"`
	// By says who made the change, Via how it came ("http", "nats", "file").
	By   string    `json:"by"`
	Via  string    `json:"via"`
	Time time.Time `json:"time"`
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

// ConfigReply answers a change request, over NATS and HTTP alike.
type ConfigReply struct {
	// Version is the version in force after the request.
	Version uint64 `json:"version"`
	// Changed lists the paths whose value the request changed; empty for a no-op.
	Changed []string `json:"changed"`
}

package events

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
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
	// Signature is the controlplane's, where it has a key (see Sign).
	Signature []byte `json:"signature,omitempty"`
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

// Sign signs the version, all of it. NATS checks subjects, and a consumer delivers where its creator says:
// the signature is what nobody but the controlplane can write.
func (c *ConfigVersion) Sign(key ed25519.PrivateKey) error {
	text, err := c.signed()
	if err == nil {
		c.Signature = ed25519.Sign(key, text)
	}
	return err
}

// Verify reports, as ErrMalformed, that the owner of key did not sign the version. Without a key it
// verifies nothing.
func (c ConfigVersion) Verify(key ed25519.PublicKey) error {
	if key == nil {
		return nil
	}
	text, err := c.signed()
	if err != nil || !ed25519.Verify(key, text, c.Signature) {
		return fmt.Errorf("%w: version %d has no valid signature of the controlplane", ErrMalformed, c.Version)
	}
	return nil
}

func (c ConfigVersion) signed() ([]byte, error) {
	c.Signature = nil
	return json.Marshal(c)
}

// ConfigKey is the private key that a secret stands for.
func ConfigKey(secret string) ed25519.PrivateKey {
	seed := sha256.Sum256([]byte("aegis.config " + secret))
	return ed25519.NewKeyFromSeed(seed[:])
}

// ParsePublicKey reads a public key as PublicKeyText writes it; "" is none.
func ParsePublicKey(text string) (ed25519.PublicKey, error) {
	if text == "" {
		return nil, nil
	}
	key, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(key) != ed25519.PublicKeySize {
		return nil, errors.New("not a public key; aegis policy public-key prints it")
	}
	return key, nil
}

// PublicKeyText is the public half of a key, as edges are given it.
func PublicKeyText(key ed25519.PrivateKey) string {
	return base64.StdEncoding.EncodeToString(key[ed25519.PrivateKeySize-ed25519.PublicKeySize:])
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

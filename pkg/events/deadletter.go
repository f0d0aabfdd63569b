package events

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// DeadLetter is a message that a service could not parse or apply.
type DeadLetter struct {
	// Stream and Seq say where the message stood; Subject what it was published to. Incarnation is the
	// stream's, as another one of the same name counts anew.
	Stream      string `json:"stream"`
	Incarnation string `json:"incarnation,omitempty"`
	Seq         uint64 `json:"seq"`
	Subject     string `json:"subject"`
	Reason      string `json:"reason"`
	// Bucket is what of the message was not applied; nil: all of it.
	Bucket *DeadBucket `json:"bucket,omitempty"`
	// Data is the message as it was, base64 in JSON.
	Data []byte `json:"data"`
}

// DeadBucket is a bucket, or one window of it, that could not be settled.
type DeadBucket struct {
	Client string      `json:"client"`
	Scope  string      `json:"scope"`
	Kind   bucket.Kind `json:"kind"`
	Window int64       `json:"window,omitempty"`
}

func (DeadLetter) wireType() string { return "aegis.deadletter.v1" }

func (d DeadLetter) valid() error {
	if d.Stream == "" || d.Seq == 0 || d.Reason == "" {
		return errors.New("stream, seq and reason must be set")
	}
	return nil
}

// ID names what the letter is about, of letters and digits: several letters about the same have the same.
func (d DeadLetter) ID() string {
	about := fmt.Sprintf("%q %q %d", d.Stream, d.Incarnation, d.Seq)
	if b := d.Bucket; b != nil {
		about += fmt.Sprintf(" %q %q %q %d", b.Client, b.Scope, b.Kind, b.Window)
	}
	sum := sha256.Sum256([]byte(about))
	return hex.EncodeToString(sum[:16])
}

// Retry is the batch that settles what the letter left out, and no more: of a boot that is the letter's
// own, "retry-<ID>", since the batch's boot has gone on counting and would make it a duplicate. Published
// any number of times it is settled once. It fails where the message still can't be read.
func (d DeadLetter) Retry() (ResponseBatch, error) {
	if d.Stream != StreamResponses {
		return ResponseBatch{}, fmt.Errorf("events: a dead letter of stream %s can't be retried, only those of %s", d.Stream, StreamResponses)
	}
	batch, err := Decode[ResponseBatch](d.Data)
	if err != nil {
		return ResponseBatch{}, err
	}
	batch.Boot, batch.N = "retry-"+d.ID(), 1
	if d.Bucket == nil {
		return batch, nil
	}
	var kept []Response
	for _, e := range batch.Events {
		if e.Client != d.Bucket.Client {
			continue
		}
		var charges []Charge
		for _, c := range e.Charges {
			if c.Scope == d.Bucket.Scope && c.Window == d.Bucket.Window && batch.Specs[c.Spec].Kind == d.Bucket.Kind {
				charges = append(charges, c)
			}
		}
		if e.Charges = charges; len(charges) > 0 {
			kept = append(kept, e)
		}
	}
	batch.Events = kept
	return batch, nil
}

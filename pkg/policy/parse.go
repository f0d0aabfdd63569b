package policy

import (
	"encoding/json"
	"fmt"
)

// Parse reads a policy from an administrator: YAML, or JSON when it begins with
// a brace. It is strict; its error is Errors. Defaults are filled in.
func Parse(doc []byte) (Policy, error) {
	root, err := readDocument(doc)
	if err != nil {
		return Policy{}, err
	}
	p, _, err := fromTree(root, false)
	return p, err
}

// Receive reads a policy that Encode wrote, perhaps a newer version's: unknown
// keys are dropped and their paths listed, everything else is as strict as
// Parse. Its error is Errors, and then nothing of doc may be used.
func Receive(doc []byte) (p Policy, dropped []string, err error) {
	root, err := readJSON(doc)
	if err != nil {
		return Policy{}, nil, err
	}
	return fromTree(root, true)
}

func fromTree(root *node, lenient bool) (Policy, []string, error) {
	var p Policy
	d := decoder{lenient: lenient}
	if err := d.decode(root, &p); err != nil {
		return Policy{}, nil, err
	}
	p = p.withDefaults()
	if err := p.Validate(); err != nil {
		return Policy{}, nil, locate(err, root)
	}
	return p, d.dropped, nil
}

// Encode gives the canonical JSON of p, defaults included: equal policies have
// equal bytes. It fails when p is invalid or larger than MaxDocument.
func Encode(p Policy) (json.RawMessage, error) {
	p = p.withDefaults()
	if err := p.Validate(); err != nil {
		return nil, err
	}
	doc, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("policy: encode: %w", err)
	}
	if len(doc) > MaxDocument {
		return nil, Errors{{Problem: fmt.Sprintf("the document has %d bytes as JSON; at most %d are allowed", len(doc), MaxDocument)}}
	}
	return doc, nil
}

// Decode reads a JSON object into the struct that out points to, as strictly as Parse reads a policy:
// unknown keys, wrong shapes and numbers out of bounds are refused with their path. It is for what
// administrators send besides policies. Its error is Errors.
func Decode(doc []byte, out any) error {
	root, err := readJSON(doc)
	if err != nil {
		return err
	}
	var d decoder
	return d.decode(root, out)
}

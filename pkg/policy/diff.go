package policy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
)

// Difference is one place in which two policies differ. From or To is null where the place is not there.
type Difference struct {
	Path string          `json:"path"`
	From json.RawMessage `json:"from"`
	To   json.RawMessage `json:"to"`
}

func (d Difference) String() string { return fmt.Sprintf("%s: %s → %s", d.Path, d.From, d.To) }

// Diff lists what differs between two policies, defaults filled in, sorted by path. It goes down
// to single values; what only one of them has is listed whole.
func Diff(from, to Policy) ([]Difference, error) {
	a, err := Encode(from)
	if err != nil {
		return nil, err
	}
	b, err := Encode(to)
	if err != nil {
		return nil, err
	}
	out := []Difference{}
	diff(&out, "", a, b)
	return out, nil
}

func diff(out *[]Difference, path string, a, b json.RawMessage) {
	if bytes.Equal(a, b) {
		return
	}
	from, isMap := object(a)
	to, both := object(b)
	if !isMap || !both {
		*out = append(*out, Difference{Path: path, From: orNull(a), To: orNull(b)})
		return
	}
	keys := sortedKeys(from)
	for key := range to {
		if _, known := from[key]; !known {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	for _, key := range keys {
		diff(out, join(path, key), from[key], to[key])
	}
}

func object(doc json.RawMessage) (map[string]json.RawMessage, bool) {
	var m map[string]json.RawMessage
	if len(doc) == 0 || doc[0] != '{' || json.Unmarshal(doc, &m) != nil {
		return nil, false
	}
	return m, true
}

func orNull(doc json.RawMessage) json.RawMessage {
	if len(doc) == 0 {
		return json.RawMessage("null")
	}
	return doc
}

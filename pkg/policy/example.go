package policy

import (
	_ "embed"
	"slices"
)

//go:embed example.yaml
var example []byte

// Example is the sample policy, a YAML document that Parse accepts and that
// shows every key with its default. deploy/policy.example.yaml is a copy of it.
func Example() []byte { return slices.Clone(example) }

package policy_test

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

func TestSchemaIsThePublishedFile(t *testing.T) {
	t.Parallel()
	want, err := policy.Schema()
	if err != nil {
		t.Fatal(err)
	}
	published, err := os.ReadFile("../../deploy/policy.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(published, want) {
		t.Error("deploy/policy.schema.json is not what the types say: make schema")
	}
}

// TestSchemaAgreesWithParse: what Parse takes the schema takes, and common slips are marked by both.
func TestSchemaAgreesWithParse(t *testing.T) {
	t.Parallel()
	raw, err := policy.Schema()
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("policy.json", doc); err != nil {
		t.Fatal(err)
	}
	schema, err := c.Compile("policy.json")
	if err != nil {
		t.Fatal(err)
	}
	valid := func(text string) error {
		var tree any
		if err := yaml.Unmarshal([]byte(text), &tree); err != nil {
			t.Fatal(err)
		}
		data, err := json.Marshal(tree)
		if err != nil {
			t.Fatal(err)
		}
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		return schema.Validate(value)
	}
	compose, err := os.ReadFile("../../deploy/policy.compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, good := range []string{string(policy.Example()), string(compose)} {
		if err := valid(good); err != nil {
			t.Error(err)
		}
	}
	const up = "upstreams: {up: {url: http://127.0.0.1:1}}\nroutes: {r: {path: /, upstream: up, "
	for _, bad := range []string{
		up + "capacityy: 3}}", up + "capacity: 0, refill_rate: 1}}", up + "capacity: 1.5, refill_rate: 1}}",
		up + "capacity: many}}", up + "algorithm: leaky_bucket}}", up + "headers: [x]}}",
		"routes: {Upper: {path: /}}", "shadow_mode: maybe", "plans: {p: {rate: 1e300, burst: 2}}",
	} {
		if _, err := policy.Parse([]byte(bad)); err == nil {
			t.Errorf("Parse takes %s", bad)
		}
		if valid(bad) == nil {
			t.Errorf("the schema takes %s", bad)
		}
	}
}

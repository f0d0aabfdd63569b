package policy_test

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

// The compose stack's policy is the example but for the place of the sample upstream.
func TestComposePolicyIsTheExample(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("../../deploy/policy.compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	got, err := policy.Parse(doc)
	if err != nil {
		t.Fatal(err)
	}
	want, err := policy.Parse(policy.Example())
	if err != nil {
		t.Fatal(err)
	}
	sample := want.Upstreams["sample"]
	sample.URL = "http://upstream:8070"
	want.Upstreams["sample"] = sample
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("deploy/policy.compose.yaml (+) is not the example (-):\n%s", diff)
	}
}

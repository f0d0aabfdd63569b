package policy_test

import (
	"bytes"
	"os"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

func TestExampleIsThePublishedFile(t *testing.T) {
	t.Parallel()
	published, err := os.ReadFile("../../deploy/policy.example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(published, policy.Example()) {
		t.Error("deploy/policy.example.yaml and pkg/policy/example.yaml differ; copy the one you changed over the other")
	}
	p, err := policy.Parse(published)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", p)
}

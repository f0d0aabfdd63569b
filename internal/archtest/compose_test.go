package archtest_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

// TestContainersAreConfined: every container of the stack has a read-only root file system, no capability,
// a user that is not root, and no secret in its command line.
func TestContainersAreConfined(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../deploy/compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	type service struct {
		Image    string   `yaml:"image"`
		User     string   `yaml:"user"`
		ReadOnly bool     `yaml:"read_only"`
		CapDrop  []string `yaml:"cap_drop"`
		Security []string `yaml:"security_opt"`
		Command  []string `yaml:"command"`
		Ports    []string `yaml:"ports"`
	}
	var doc struct {
		Services map[string]service `yaml:"services"`
	}
	if err := yaml.UnmarshalWithOptions(data, &doc, yaml.AllowDuplicateMapKey()); err != nil {
		t.Fatal(err)
	}
	if len(doc.Services) < 8 {
		t.Fatalf("only %d services", len(doc.Services))
	}
	for name, s := range doc.Services {
		if !s.ReadOnly {
			t.Errorf("%s: its root file system can be written to", name)
		}
		if !slices.Contains(s.CapDrop, "ALL") || !slices.Contains(s.Security, "no-new-privileges:true") {
			t.Errorf("%s: it keeps capabilities, or may gain privileges", name)
		}
		// Ours say USER in deploy/Dockerfile; haproxy's image has an unprivileged user of its own.
		own := strings.HasPrefix(s.Image, "aegisrate/") || strings.HasPrefix(s.Image, "haproxy:")
		if !own && (s.User == "" || s.User == "root" || strings.HasPrefix(s.User, "0")) {
			t.Errorf("%s: it runs as root", name)
		}
		if line := strings.Join(s.Command, " "); strings.Contains(line, "PASSWORD") || strings.Contains(line, "TOKEN") {
			t.Errorf("%s: a secret is in its command line: %s", name, line)
		}
		for _, p := range s.Ports {
			if !strings.HasPrefix(p, "127.0.0.1:") {
				t.Errorf("%s: port %s is open to the network", name, p)
			}
		}
	}
	file, err := os.ReadFile("../../deploy/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(file), "\nUSER 65532:65532\n") {
		t.Error("deploy/Dockerfile gives its images no user")
	}
}

package archtest_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// promised is a package's name in docs/consistency.md, or a test's.
var promised = regexp.MustCompile("`?([a-z0-9/]+)(?:: | `)(Test[A-Za-z0-9]+)|`(Test[A-Za-z0-9]+)")

// TestPromisesHaveTheirTests: a test that docs/consistency.md names is there, in the package that it
// says. What a promise rests on must not vanish by a renaming.
func TestPromisesHaveTheirTests(t *testing.T) {
	t.Parallel()
	dir := root(t)
	doc, err := os.ReadFile(filepath.Join(dir, "docs", "consistency.md"))
	if err != nil {
		t.Fatal(err)
	}
	// Short names of the tables; others are folders themselves.
	folders := map[string]string{
		"store": "pkg/bucket/store/redisstore", "storetest": "pkg/bucket/store/redisstore", "bucket": "pkg/bucket", "bus": "pkg/bus",
		"framing": "pkg/framing", "edge": "services/edge", "edge/admission": "services/edge/admission", "proxy": "services/edge/proxy", "edge/llm": "services/edge/llm", "ratelimiter": "pkg/ratelimiter",
		"settler": "services/settler", "healthwatch": "services/healthwatch", "controlplane": "services/controlplane",
		"stack": "cmd/aegis/stack", "memstore": "pkg/bucket/store/memstore", "cache": "services/edge/cache", "deferral": "services/edge/deferral",
	}
	found := 0
	for i, line := range strings.Split(string(doc), "\n") {
		if !strings.HasPrefix(line, "|") {
			continue
		}
		pkg := ""
		for _, m := range promised.FindAllStringSubmatch(line, -1) {
			test := m[2] + m[3]
			if m[1] != "" {
				pkg = m[1]
			}
			folder, short := folders[pkg]
			if !short {
				folder = pkg
			}
			if !declares(t, filepath.Join(dir, folder), test) {
				t.Errorf("docs/consistency.md:%d: %s has no %s", i+1, folder, test)
			}
			found++
		}
	}
	if found < 40 {
		t.Errorf("%d tests found in the tables: they are no longer read", found)
	}
}

// declares says whether a test file of the folder has the test.
func declares(t *testing.T, folder, test string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(src), "\nfunc "+test+"(t *testing.T) {") {
			return true
		}
	}
	return false
}

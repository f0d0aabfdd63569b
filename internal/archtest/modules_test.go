package archtest_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/aegisrate/aegisrate/internal/archtest"
)

// module is what `go mod edit -json` tells of a go.mod.
type module struct {
	Module  struct{ Path string }
	Go      string
	Require []struct {
		Path, Version string
		Indirect      bool
	}
	Replace []struct {
		Old, New struct{ Path, Version string }
	}
}

// TestModulesStandAlone holds what a build with GOWORK=off (or in Docker) rests
// on: every module is in go.work, replaces each sibling it requires by its
// folder, replaces nothing else, and names each library in the version that the
// others do.
func TestModulesStandAlone(t *testing.T) {
	t.Parallel()
	root := root(t)
	used := workspaceFolders(t, root)
	versions := make(map[string]string) // library → version, from the first module that requires it
	owner := make(map[string]string)
	for _, dir := range moduleFolders(t, root) {
		rel, err := filepath.Rel(root, dir)
		if err != nil {
			t.Fatal(err)
		}
		if !used[dir] {
			t.Errorf("%s has a go.mod but is not in go.work", rel)
		}
		mod := readModule(t, dir)
		if want := strings.TrimSuffix(archtest.Root+"/"+filepath.ToSlash(rel), "/."); mod.Module.Path != want {
			t.Errorf("%s: module %s, want %s", rel, mod.Module.Path, want)
		}
		replaced := make(map[string]string)
		for _, r := range mod.Replace {
			if !strings.HasPrefix(r.Old.Path, archtest.Root) {
				t.Errorf("%s replaces %s: only siblings may be replaced, others can't follow", rel, r.Old.Path)
			}
			replaced[r.Old.Path] = filepath.Clean(filepath.Join(dir, r.New.Path))
		}
		for _, r := range mod.Require {
			if strings.HasPrefix(r.Path, archtest.Root) {
				want := filepath.Join(root, strings.TrimPrefix(r.Path, archtest.Root))
				if replaced[r.Path] != want {
					t.Errorf("%s requires %s but does not replace it by its folder", rel, r.Path)
				}
				continue
			}
			if r.Indirect {
				continue
			}
			if v, ok := versions[r.Path]; ok && v != r.Version {
				t.Errorf("%s requires %s %s, %s requires %s: pin one version", rel, r.Path, r.Version, owner[r.Path], v)
			} else if !ok {
				versions[r.Path], owner[r.Path] = r.Version, rel
			}
		}
	}
}

// root is the folder of go.work.
func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			t.Fatal("no go.work above the test")
		}
		dir = up
	}
}

func moduleFolders(t *testing.T, root string) []string {
	t.Helper()
	var dirs []string
	err := filepath.WalkDir(root, func(name string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || d.Name() == "data" || d.Name() == "bin"):
			return filepath.SkipDir
		case d.Name() == "go.mod":
			dirs = append(dirs, filepath.Dir(name))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(dirs) < 7 {
		t.Fatalf("found %d modules, want the root, four services, cmd/aegis and e2e", len(dirs))
	}
	return dirs
}

func workspaceFolders(t *testing.T, root string) map[string]bool {
	t.Helper()
	var work struct {
		Use []struct{ DiskPath string }
	}
	goJSON(t, &work, "work", "edit", "-json", filepath.Join(root, "go.work"))
	used := make(map[string]bool)
	for _, u := range work.Use {
		used[filepath.Join(root, u.DiskPath)] = true
	}
	return used
}

func readModule(t *testing.T, dir string) module {
	t.Helper()
	var mod module
	goJSON(t, &mod, "mod", "edit", "-json", filepath.Join(dir, "go.mod"))
	return mod
}

func goJSON(t *testing.T, into any, args ...string) {
	t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command("go", args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go %s: %v: %s", strings.Join(args, " "), err, stderr.String())
	}
	if err := json.Unmarshal(out, into); err != nil {
		t.Fatalf("go %s: %v", strings.Join(args, " "), err)
	}
}

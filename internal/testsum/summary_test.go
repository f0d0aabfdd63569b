package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestSummaryOfRealRuns runs go test on small modules, since what the go command
// prints when something breaks is what this tool must not misread.
func TestSummaryOfRealRuns(t *testing.T) {
	t.Parallel()
	const head = "package x\nimport (\"testing\"; \"os\")\nvar _ = os.Exit\n"
	cases := []struct {
		name, source, last string
		ok                 bool
	}{
		{"all pass", head + `
func TestA(t *testing.T) { t.Run("sub", func(t *testing.T) {}) }
func TestB(t *testing.T) {}`, "3 passed, 0 failed", true},
		{"one fails", head + `
func TestA(t *testing.T) {}
func TestB(t *testing.T) { t.Error("no") }`, "1 passed, 1 failed", false},
		{"one is skipped", head + `
func TestA(t *testing.T) {}
func TestB(t *testing.T) { t.Skip("later") }`, "1 passed, 0 failed, 1 skipped (a skipped test is a failure here)", false},
		{"does not build", head + `
func TestA(t *testing.T) { undefined() }`, "0 passed, 1 failed", false},
		{"panics", head + `
func TestA(t *testing.T) {}
func TestB(t *testing.T) { panic("boom") }`, "1 passed, 1 failed", false},
		{"exits early with success", head + `
func TestA(t *testing.T) { os.Exit(0) }`, "0 passed, 1 failed", false},
		{"main fails after its tests passed", head + `
func TestMain(m *testing.M) { m.Run(); os.Exit(3) }
func TestA(t *testing.T) {}`, "1 passed, 1 failed", false},
		{"no tests", "package x\n", "0 passed, 0 failed", false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			write(t, dir, "go.mod", "module example.com/x\n\ngo 1.26.0\n")
			write(t, dir, "x_test.go", c.source)
			cmd := exec.Command("go", "test", "-json", "./...")
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=")
			stream, _ := cmd.CombinedOutput() // go test fails where the case does; the stream is what counts

			sum, out := newSummary(), &strings.Builder{}
			if err := sum.read(strings.NewReader(string(stream)), out); err != nil {
				t.Fatal(err)
			}
			ok := sum.report(out)
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if last := lines[len(lines)-1]; last != c.last || ok != c.ok {
				t.Errorf("got %q and %v, want %q and %v; stream:\n%s", last, ok, c.last, c.ok, stream)
			}
		})
	}
}

func TestCutStreamIsAFailure(t *testing.T) {
	t.Parallel()
	const cut = `{"Action":"start","Package":"x"}
{"Action":"run","Package":"x","Test":"TestA"}
`
	sum, out := newSummary(), &strings.Builder{}
	if err := sum.read(strings.NewReader(cut), out); err != nil {
		t.Fatal(err)
	}
	if sum.report(out) {
		t.Errorf("a stream that was cut off counts as success:\n%s", out)
	}
}

// TestTotalTakesTheWorst adds up two runs of the same tests.
func TestTotalTakesTheWorst(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a := write(t, dir, "a.json", `{"Action":"pass","Package":"x","Test":"TestA"}
{"Action":"pass","Package":"x","Test":"TestB"}
`)
	b := write(t, dir, "b.json", `{"Action":"fail","Package":"x","Test":"TestA"}
{"Action":"pass","Package":"x","Test":"TestB"}
`)
	for _, order := range [][]string{{a, b}, {b, a}} {
		if ok, err := run("", true, order); ok || err != nil {
			t.Errorf("run(%v) = %v, %v; want a failure", order, ok, err)
		}
	}
	if ok, err := run("", true, []string{a, a}); !ok || err != nil {
		t.Errorf("run = %v, %v; want success", ok, err)
	}
}

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

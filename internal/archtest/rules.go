package archtest

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

// Violation is one broken rule.
type Violation struct {
	// Rule names the rule, as in the list in rules.go.
	Rule string
	// Where is file:line.
	Where string
	// What says what is there and what is allowed instead.
	What string
}

func (v Violation) String() string { return v.Where + ": " + v.What + " [" + v.Rule + "]" }

// Check reads the tree of the workspace and gives every violation in it.
func Check(tree fs.FS) ([]Violation, error) {
	files, err := load(tree)
	if err != nil {
		return nil, err
	}
	w := newWorkspace(files)
	var found []Violation
	for _, r := range rules {
		for _, f := range files {
			for _, p := range r.breaks(w, f) {
				found = append(found, Violation{Rule: r.name, Where: fmt.Sprintf("%s:%d", f.name, p.line), What: p.what})
			}
		}
	}
	return found, nil
}

type problem struct {
	line int
	what string
}

type rule struct {
	name string
	// breaks gives what breaks the rule in one file.
	breaks func(w workspace, f file) []problem
}

// rules is the architecture as imports. Tests keep them too, unless a rule says otherwise.
var rules = []rule{
	{"core-is-pure", coreIsPure},
	{"admission-knows-no-http", reachesNone("services/edge/admission", "net/http")},
	{"events-know-no-transport", reachesNone("pkg/events", "net/http", nats, redis)},
	{"policy-knows-no-transport", reachesNone("pkg/policy", "net/http", nats, redis)},
	{"nats-behind-bus", importedOnlyBy(nats, "pkg/bus", "cmd/aegis/stack", "e2e", "deploy")},
	{"redis-behind-store", importedOnlyBy(redis, "pkg/bucket/store/redisstore", "pkg/bucket/store/redistest", "pkg/ratelimiter", "cmd/aegis/stack", "e2e")},
	{"embedded-redis-only-embedded", importedOnlyBy(miniredis, "pkg/bucket/store/redisstore", "cmd/aegis/stack")},
	{"services-apart", servicesApart},
	{"layers", layers},
	{"mains-own-the-process", mainsOwnTheProcess},
	{"helpers-in-tests-only", helpersInTestsOnly},
}

const (
	nats      = "github.com/nats-io/"
	redis     = "github.com/redis/"
	miniredis = "github.com/alicebob/miniredis/"
)

// coreIsPure: lua and pkg/bucket build on the standard library only, and the
// algorithms take the time as an argument and touch nothing outside.
func coreIsPure(_ workspace, f file) []problem {
	if f.test || f.pkg != "lua" && f.pkg != "pkg/bucket" {
		return nil
	}
	var found []problem
	for _, i := range f.imports {
		switch {
		case !standard(i.path):
			found = append(found, problem{i.line, f.pkg + " imports " + i.path + "; only the standard library is allowed"})
		case f.pkg == "pkg/bucket" && under(i.path, "time", "context", "net", "log", "os"):
			found = append(found, problem{i.line, "pkg/bucket imports " + i.path + "; clocks and the outside are its caller's"})
		}
	}
	return found
}

// reachesNone: neither the package (with those below it) nor any package of this
// workspace that it builds on imports one of the banned prefixes.
func reachesNone(pkg string, banned ...string) func(workspace, file) []problem {
	return func(w workspace, f file) []problem {
		if f.helper() || !below(f.pkg, pkg) {
			return nil
		}
		var found []problem
		for _, i := range f.imports {
			if under(i.path, banned...) {
				found = append(found, problem{i.line, f.pkg + " imports " + i.path})
				continue
			}
			if way := w.wayTo(own(i.path), banned); way != nil {
				found = append(found, problem{i.line, f.pkg + " reaches it by " + strings.Join(way, " → ")})
			}
		}
		return found
	}
}

// importedOnlyBy: the library is used in those packages (and below them) and nowhere else.
func importedOnlyBy(library string, pkgs ...string) func(workspace, file) []problem {
	return func(_ workspace, f file) []problem {
		if below(f.pkg, pkgs...) {
			return nil
		}
		var found []problem
		for _, i := range f.imports {
			if under(i.path, library) {
				found = append(found, problem{i.line, fmt.Sprintf("%s imports %s; only %s may", f.pkg, i.path, strings.Join(pkgs, ", "))})
			}
		}
		return found
	}
}

// servicesApart: services meet on NATS and in Redis, never in code.
func servicesApart(_ workspace, f file) []problem {
	mine, ok := service(f.pkg)
	if !ok {
		return nil
	}
	var found []problem
	for _, i := range f.imports {
		if other, ok := service(own(i.path)); ok && other != mine {
			found = append(found, problem{i.line, "service " + mine + " imports service " + other})
		}
	}
	return found
}

// layers: what is shared never builds on what uses it.
func layers(_ workspace, f file) []problem {
	var found []problem
	for _, i := range f.imports {
		to := own(i.path)
		switch {
		case below(to, "e2e") && !below(f.pkg, "e2e"):
			found = append(found, problem{i.line, "nothing imports e2e"})
		case below(to, "services", "cmd") && below(f.pkg, "pkg", "lua", "internal"):
			found = append(found, problem{i.line, f.pkg + " imports " + to + "; shared packages never build on services or commands"})
		case below(to, "cmd") && below(f.pkg, "services"):
			found = append(found, problem{i.line, f.pkg + " imports " + to + "; services never build on commands"})
		}
	}
	return found
}

// mainsOwnTheProcess: only mains read the environment and flags, take signals and
// exit; everything else is told by its caller. Code for tests is free to, and e2e is nothing else.
func mainsOwnTheProcess(_ workspace, f file) []problem {
	if f.main || f.helper() || below(f.pkg, "e2e") {
		return nil
	}
	var found []problem
	for _, i := range f.imports {
		if under(i.path, "flag", "os/signal", "github.com/alecthomas/kong") {
			found = append(found, problem{i.line, "imports " + i.path + "; only a main may"})
		}
	}
	for _, u := range f.uses {
		switch u.what {
		case "os.Getenv", "os.LookupEnv", "os.Environ", "os.ExpandEnv", "os.Args", "os.Exit", "log.Fatal", "log.Fatalf", "log.Fatalln":
			found = append(found, problem{u.line, "uses " + u.what + "; only a main may"})
		}
	}
	return found
}

// helpersInTestsOnly: a package that takes a *testing.T never ends up in a binary.
func helpersInTestsOnly(w workspace, f file) []problem {
	if f.helper() {
		return nil
	}
	var found []problem
	for _, i := range f.imports {
		if w.helpers[own(i.path)] {
			found = append(found, problem{i.line, "imports the test helper " + i.path})
		}
	}
	return found
}

// workspace is what the rules need to know beyond a single file.
type workspace struct {
	// imports has what the non-test files of each package import; helpers the packages for tests only.
	imports map[string][]string
	helpers map[string]bool
}

func newWorkspace(files []file) workspace {
	w := workspace{imports: make(map[string][]string), helpers: make(map[string]bool)}
	for _, f := range files {
		if f.test {
			continue
		}
		if f.helper() {
			w.helpers[f.pkg] = true
		}
		for _, i := range f.imports {
			if !slices.Contains(w.imports[f.pkg], i.path) {
				w.imports[f.pkg] = append(w.imports[f.pkg], i.path)
			}
		}
	}
	return w
}

// wayTo gives the shortest chain of imports from one of our packages to a banned one, or nil.
func (w workspace) wayTo(from string, banned []string) []string {
	if from == "" {
		return nil
	}
	type step struct {
		pkg string
		way []string
	}
	seen := map[string]bool{from: true}
	for queue := []step{{from, []string{from}}}; len(queue) > 0; queue = queue[1:] {
		at := queue[0]
		for _, p := range w.imports[at.pkg] {
			if under(p, banned...) {
				return append(at.way, p)
			}
			if next := own(p); next != "" && !seen[next] {
				seen[next] = true
				queue = append(queue, step{next, append(slices.Clone(at.way), next)})
			}
		}
	}
	return nil
}

// own is the part of an import path below Root; "" for everybody else's.
func own(importPath string) string {
	rest, ok := strings.CutPrefix(importPath, Root+"/")
	if !ok {
		return ""
	}
	return rest
}

// service names the service that a package belongs to.
func service(pkg string) (string, bool) {
	rest, ok := strings.CutPrefix(pkg, "services/")
	if !ok {
		return "", false
	}
	name, _, _ := strings.Cut(rest, "/")
	return name, true
}

// standard reports whether an import path is the standard library's: no dot in its first part.
func standard(importPath string) bool {
	first, _, _ := strings.Cut(importPath, "/")
	return !strings.Contains(first, ".")
}

// below reports whether pkg is one of the folders or inside one.
func below(pkg string, folders ...string) bool {
	for _, f := range folders {
		if pkg == f || strings.HasPrefix(pkg, f+"/") {
			return true
		}
	}
	return false
}

// under is below for import paths; a prefix that ends in a slash matches all inside.
func under(importPath string, prefixes ...string) bool {
	for _, p := range prefixes {
		if below(importPath, strings.TrimSuffix(p, "/")) {
			return true
		}
	}
	return false
}

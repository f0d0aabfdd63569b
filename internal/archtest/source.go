package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// Root is the import path of the root module; every other module's lies below it.
const Root = "github.com/aegisrate/aegisrate"

// file is what the rules look at in one source file.
type file struct {
	name    string // slash-separated, from the root of the tree
	pkg     string // import path below Root: "pkg/bus"; "" is the root itself
	main    bool
	test    bool // a _test.go file
	imports []imported
	uses    []use
}

type imported struct {
	path string
	line int
}

// use is a selector on an imported package, such as os.Exit.
type use struct {
	what string // "os.Exit"
	line int
}

// helper reports whether the file is code for tests only: a test file, or one
// of a package that takes a *testing.T.
func (f file) helper() bool {
	return f.test || f.importsPath("testing")
}

func (f file) importsPath(p string) bool {
	for _, i := range f.imports {
		if i.path == p {
			return true
		}
	}
	return false
}

// load reads every Go file of the tree except those in hidden, vendor and testdata folders.
func load(tree fs.FS) ([]file, error) {
	var files []file
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			base := d.Name()
			if name != "." && (strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") || base == "testdata" || base == "vendor" || name == "data" || name == "bin") {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		src, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		f, err := parse(name, src)
		if err != nil {
			return err
		}
		files = append(files, f)
		return nil
	})
	return files, err
}

func parse(name string, src []byte) (file, error) {
	set := token.NewFileSet()
	syntax, err := parser.ParseFile(set, name, src, parser.SkipObjectResolution)
	if err != nil {
		return file{}, fmt.Errorf("archtest: %w", err)
	}
	f := file{
		name: name,
		pkg:  strings.TrimPrefix(path.Dir(name), "."),
		main: syntax.Name.Name == "main",
		test: strings.HasSuffix(name, "_test.go"),
	}
	local := make(map[string]string) // the name a package goes by here → its path
	for _, spec := range syntax.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return file{}, fmt.Errorf("archtest: %s: import %s: %w", name, spec.Path.Value, err)
		}
		f.imports = append(f.imports, imported{path: p, line: set.Position(spec.Pos()).Line})
		as := path.Base(p)
		if spec.Name != nil {
			as = spec.Name.Name
		}
		local[as] = p
	}
	ast.Inspect(syntax, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := sel.X.(*ast.Ident); ok && local[x.Name] != "" {
			f.uses = append(f.uses, use{what: local[x.Name] + "." + sel.Sel.Name, line: set.Position(sel.Pos()).Line})
		}
		return true
	})
	return f, nil
}

package policy

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
	"strconv"
	"strings"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// source is where the schema's descriptions and the values of text types come from: what the types'
// own comments and constants say, said once.
//
//go:embed policy.go
var source []byte

// Schema is the JSON Schema (2020-12) of a policy, for editors: every key with its description, its
// bounds and its values. It is laxer than Parse, which also knows what goes together.
func Schema() ([]byte, error) {
	docs, err := readSource()
	if err != nil {
		return nil, err
	}
	s := docs.of(reflect.TypeFor[Policy](), "")
	s["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	s["title"] = "AegisRate policy"
	out, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("policy: schema: %w", err)
	}
	return append(out, '\n'), nil
}

type schema map[string]any

// sourceDocs is what the source says: comments by "Type.Field", the values of text types by type.
type sourceDocs struct {
	comments map[string]string
	values   map[string][]string
}

func readSource() (sourceDocs, error) {
	d := sourceDocs{map[string]string{}, map[string][]string{
		reflect.TypeFor[bucket.Kind]().Name(): {string(bucket.TokenBucket), string(bucket.SlidingWindow)},
	}}
	file, err := parser.ParseFile(token.NewFileSet(), "policy.go", source, parser.ParseComments)
	if err != nil {
		return d, fmt.Errorf("policy: schema: %w", err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.TypeSpec:
			if st, ok := n.Type.(*ast.StructType); ok {
				d.fields(n.Name.Name, st)
			}
		case *ast.ValueSpec:
			kind, ok := n.Type.(*ast.Ident)
			if !ok || len(n.Values) != 1 {
				break
			}
			if lit, ok := n.Values[0].(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if text, err := strconv.Unquote(lit.Value); err == nil {
					d.values[kind.Name] = append(d.values[kind.Name], text)
				}
			}
		}
		return true
	})
	return d, nil
}

func (d sourceDocs) fields(typeName string, st *ast.StructType) {
	for _, f := range st.Fields.List {
		text := f.Doc.Text()
		if text == "" {
			text = f.Comment.Text()
		}
		text = strings.Join(strings.Fields(text), " ")
		for _, name := range f.Names {
			d.comments[typeName+"."+name.Name] = text
		}
	}
}

// of is the schema of a type under key, which decides the bounds of numbers.
func (d sourceDocs) of(t reflect.Type, key string) schema {
	switch t.Kind() {
	case reflect.Pointer:
		return d.of(t.Elem(), key)
	case reflect.Struct:
		return d.object(t)
	case reflect.Map:
		return schema{"type": "object", "propertyNames": schema{"pattern": nameForm.String()}, "additionalProperties": d.of(t.Elem(), "")}
	case reflect.Slice:
		return schema{"type": "array", "items": d.of(t.Elem(), key)}
	case reflect.Bool:
		return schema{"type": "boolean"}
	case reflect.String:
		if values := d.values[t.Name()]; len(values) > 0 {
			return schema{"enum": values}
		}
		return schema{"type": "string"}
	}
	s := schema{"type": "number"}
	if t.Kind() != reflect.Float64 {
		s["type"] = "integer"
	}
	if b, ok := bounds[key]; ok {
		s["minimum"], s["maximum"] = b.min, b.max
	}
	return s
}

func (d sourceDocs) object(t reflect.Type) schema {
	properties := schema{}
	for _, f := range reflect.VisibleFields(t) {
		key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if key == "" || f.Anonymous {
			continue
		}
		s := d.of(f.Type, key)
		owner := t
		if len(f.Index) > 1 { // promoted from an embedded struct
			owner = t.FieldByIndex(f.Index[:len(f.Index)-1]).Type
		}
		if text := d.comments[owner.Name()+"."+f.Name]; text != "" {
			s["description"] = text
		}
		properties[key] = s
	}
	return schema{"type": "object", "properties": properties, "additionalProperties": false}
}

package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

const (
	// maxDepth bounds the nesting of a document; a policy needs 6 levels.
	maxDepth = 16
	// maxSiblings bounds the keys of one YAML mapping: the YAML parser takes time
	// quadratic in them. No valid policy has more.
	maxSiblings = MaxUsers + 16
)

// kind is the shape of a node.
type kind uint8

const (
	isNull kind = iota
	isBool
	isNumber
	isText
	isList
	isMap
)

func (k kind) String() string {
	return [...]string{"null", "a truth value", "a number", "a text", "a list", "a mapping"}[k]
}

// node is a value of a document as it was written: numbers keep their text, so
// that nothing is rounded or read as infinite before it was looked at.
type node struct {
	kind    kind
	line    int
	text    string // of a bool, number or text
	items   []*node
	entries []entry
}

type entry struct {
	key   string
	line  int
	value *node
}

// readDocument reads JSON when the document begins with a brace, else YAML.
func readDocument(doc []byte) (*node, error) {
	if err := checkText(doc); err != nil {
		return nil, err
	}
	if trimmed := bytes.TrimLeft(doc, " \t\r\n"); len(trimmed) > 0 && trimmed[0] == '{' {
		return parseJSON(doc)
	}
	return parseYAML(doc)
}

// readJSON reads JSON only.
func readJSON(doc []byte) (*node, error) {
	if err := checkText(doc); err != nil {
		return nil, err
	}
	return parseJSON(doc)
}

func checkText(doc []byte) error {
	if len(doc) > MaxDocument {
		return Errors{{Problem: fmt.Sprintf("the document has %d bytes; at most %d are allowed", len(doc), MaxDocument)}}
	}
	if len(bytes.TrimSpace(doc)) == 0 {
		return Errors{{Problem: "the document is empty"}}
	}
	if !utf8.Valid(doc) {
		return Errors{{Problem: "the document is not valid UTF-8"}}
	}
	return nil
}

// jsonReader builds the tree of a JSON text and tracks the line it is on.
type jsonReader struct {
	dec  *json.Decoder
	doc  []byte
	seen int // bytes of doc whose newlines are counted
	line int
}

func parseJSON(doc []byte) (*node, error) {
	r := &jsonReader{dec: json.NewDecoder(bytes.NewReader(doc)), doc: doc, line: 1}
	r.dec.UseNumber()
	root, err := r.value("", 0)
	if err != nil {
		return nil, err
	}
	if _, err := r.dec.Token(); !errors.Is(err, io.EOF) {
		return nil, Errors{{Problem: "there is more after the end of the JSON document", Line: r.here()}}
	}
	return root, nil
}

// here is the line of the token read last.
func (r *jsonReader) here() int {
	to := min(int(r.dec.InputOffset()), len(r.doc))
	if to > r.seen {
		r.line += bytes.Count(r.doc[r.seen:to], []byte{'\n'})
		r.seen = to
	}
	return r.line
}

func (r *jsonReader) token(path string) (json.Token, error) {
	tok, err := r.dec.Token()
	if err != nil {
		problem := "not valid JSON: " + err.Error()
		if errors.Is(err, io.EOF) {
			problem = "not valid JSON: it ends too early"
		}
		return nil, Errors{{Path: path, Problem: problem, Line: r.here()}}
	}
	return tok, nil
}

func (r *jsonReader) value(path string, depth int) (*node, error) {
	tok, err := r.token(path)
	if err != nil {
		return nil, err
	}
	n := &node{line: r.here()}
	switch tok := tok.(type) {
	case nil:
		n.kind = isNull
	case bool:
		n.kind, n.text = isBool, strconv.FormatBool(tok)
	case json.Number:
		n.kind, n.text = isNumber, tok.String()
	case string:
		n.kind, n.text = isText, tok
	case json.Delim:
		if depth == maxDepth {
			return nil, tooDeep(path, n.line)
		}
		if tok == '[' {
			return n, r.list(n, path, depth)
		}
		return n, r.object(n, path, depth)
	}
	return n, nil
}

func (r *jsonReader) list(n *node, path string, depth int) error {
	n.kind = isList
	for r.dec.More() {
		item, err := r.value(index(path, len(n.items)), depth+1)
		if err != nil {
			return err
		}
		n.items = append(n.items, item)
	}
	_, err := r.token(path)
	return err
}

func (r *jsonReader) object(n *node, path string, depth int) error {
	n.kind = isMap
	keys := make(map[string]int)
	for r.dec.More() {
		tok, err := r.token(path)
		if err != nil {
			return err
		}
		// The decoder hands out nothing but strings where an object's keys stand.
		key, _ := tok.(string)
		line, at := r.here(), join(path, key)
		if err := noteKey(keys, key, at, line); err != nil {
			return err
		}
		value, err := r.value(at, depth+1)
		if err != nil {
			return err
		}
		n.entries = append(n.entries, entry{key: key, line: line, value: value})
	}
	_, err := r.token(path)
	return err
}

func noteKey(keys map[string]int, key, path string, line int) error {
	if first, dup := keys[key]; dup {
		return Errors{{Path: path, Problem: fmt.Sprintf("the key is there twice, first on line %d; remove one", first), Line: line}}
	}
	keys[key] = line
	return nil
}

func tooDeep(path string, line int) error {
	return Errors{{Path: path, Problem: fmt.Sprintf("nested more than %d levels deep", maxDepth), Line: line}}
}

func index(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

func parseYAML(doc []byte) (*node, error) {
	tokens := lexer.Tokenize(string(doc))
	if err := boundTokens(tokens); err != nil {
		return nil, err
	}
	// Repeated keys are found below, where their path is known.
	file, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		return nil, yamlError(err)
	}
	var root *node
	for _, d := range file.Docs {
		if d.Body == nil {
			continue
		}
		if root != nil {
			return nil, Errors{{Problem: "the file has several YAML documents; a policy is one", Line: lineOf(d.Body)}}
		}
		if root, err = fromYAML(d.Body, "", 0); err != nil {
			return nil, err
		}
	}
	if root == nil {
		return nil, Errors{{Problem: "the document is empty"}}
	}
	return root, nil
}

// boundTokens refuses what would make the YAML parser slow, in one pass: deep
// nesting and mappings of too many keys.
func boundTokens(tokens token.Tokens) error {
	type block struct{ column, keys int }
	var open []block // enclosing block mappings and sequences, columns ascending
	flow := 0
	for _, t := range tokens {
		column := t.Position.Column
		switch t.Type {
		case token.SequenceStartType, token.MappingStartType:
			flow++
		case token.SequenceEndType, token.MappingEndType:
			flow = max(0, flow-1)
		case token.MappingValueType:
			if t.Prev != nil {
				column = t.Prev.Position.Column
			}
			fallthrough
		case token.SequenceEntryType, token.MappingKeyType:
			if flow > 0 {
				column = 1 << 30 // keys of flow mappings count together
			}
			for len(open) > 0 && open[len(open)-1].column > column {
				open = open[:len(open)-1]
			}
			if len(open) == 0 || open[len(open)-1].column < column {
				open = append(open, block{column: column})
			}
			last := &open[len(open)-1]
			if last.keys++; last.keys > maxSiblings {
				return Errors{{Problem: fmt.Sprintf("more than %d keys in one mapping", maxSiblings), Line: t.Position.Line}}
			}
		}
		if len(open)+flow > 2*maxDepth {
			return tooDeep("", t.Position.Line)
		}
	}
	return nil
}

// yamlError carries a syntax error's line over; the parser's own text spans many lines.
func yamlError(err error) error {
	var at interface {
		GetMessage() string
		GetToken() *token.Token
	}
	if !errors.As(err, &at) || at.GetToken() == nil {
		return Errors{{Problem: "not valid YAML: " + err.Error()}}
	}
	return Errors{{Problem: "not valid YAML: " + at.GetMessage(), Line: at.GetToken().Position.Line}}
}

func lineOf(n ast.Node) int {
	if t := n.GetToken(); t != nil && t.Position != nil {
		return t.Position.Line
	}
	return 0
}

func fromYAML(y ast.Node, path string, depth int) (*node, error) {
	n := &node{line: lineOf(y)}
	scalar := func(k kind, text string) (*node, error) {
		n.kind, n.text = k, text
		return n, nil
	}
	switch y := y.(type) {
	case *ast.NullNode:
		return n, nil
	case *ast.BoolNode:
		return scalar(isBool, strconv.FormatBool(y.Value))
	case *ast.StringNode:
		// The parser takes some numbers for plain text: 1e-7, or what no float64 holds.
		if y.Token.Type == token.StringType && numberForm.MatchString(y.Value) {
			return scalar(isNumber, y.Value)
		}
		return scalar(isText, y.Value)
	case *ast.LiteralNode:
		return scalar(isText, y.Value.Value)
	case *ast.IntegerNode, *ast.FloatNode, *ast.InfinityNode, *ast.NanNode:
		return scalar(isNumber, y.GetToken().Value)
	}
	if depth == maxDepth {
		return nil, tooDeep(path, n.line)
	}
	switch y := y.(type) {
	case *ast.SequenceNode:
		n.kind = isList
		for i, v := range y.Values {
			item, err := fromYAML(v, index(path, i), depth+1)
			if err != nil {
				return nil, err
			}
			n.items = append(n.items, item)
		}
		return n, nil
	case *ast.MappingNode:
		return n, yamlEntries(n, y.Values, path, depth)
	case *ast.MappingValueNode:
		return n, yamlEntries(n, []*ast.MappingValueNode{y}, path, depth)
	}
	return nil, Errors{{Path: path, Problem: "anchors, aliases, tags and merge keys are not read in a policy; write the value out", Line: n.line}}
}

func yamlEntries(n *node, values []*ast.MappingValueNode, path string, depth int) error {
	n.kind = isMap
	keys := make(map[string]int)
	for _, v := range values {
		line := lineOf(v.Key)
		key, ok := yamlKey(v.Key)
		if !ok {
			return Errors{{Path: path, Problem: "a key must be a plain word", Line: line}}
		}
		at := join(path, key)
		if err := noteKey(keys, key, at, line); err != nil {
			return err
		}
		value, err := fromYAML(v.Value, at, depth+1)
		if err != nil {
			return err
		}
		n.entries = append(n.entries, entry{key: key, line: line, value: value})
	}
	return nil
}

func yamlKey(k ast.MapKeyNode) (string, bool) {
	switch k := k.(type) {
	case *ast.StringNode:
		return k.Value, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.NullNode:
		return k.GetToken().Value, true
	}
	return "", false
}

// locate gives errors that were found after reading the lines of the fields they
// are about, or of the nearest mapping around an absent one.
func locate(err error, root *node) error {
	var errs Errors
	if !errors.As(err, &errs) {
		return err
	}
	lines := make(map[string]int)
	root.lines("", lines)
	for i, e := range errs {
		for at := e.Path; e.Line == 0 && at != ""; {
			errs[i].Line = lines[at]
			if errs[i].Line != 0 {
				break
			}
			cut := strings.LastIndexAny(at, ".[")
			at = at[:max(cut, 0)]
		}
	}
	return errs
}

// lines notes the line of every path below n.
func (n *node) lines(path string, into map[string]int) {
	for _, e := range n.entries {
		at := join(path, e.key)
		into[at] = e.line
		e.value.lines(at, into)
	}
	for i, item := range n.items {
		at := index(path, i)
		into[at] = item.line
		item.lines(at, into)
	}
}

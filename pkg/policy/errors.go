package policy

import (
	"fmt"
	"strconv"
	"strings"
)

// maxErrors bounds how many problems one document is reported with.
const maxErrors = 50

// FieldError is one problem of a document and where it stands.
type FieldError struct {
	// Path names the field, such as "routes.fast.capacity"; "" is the document itself.
	Path string `json:"path"`
	// Problem says what is wrong and what to write instead.
	Problem string `json:"problem"`
	// Line is where the field stands in the text; 0 when the policy was not read from one.
	Line int `json:"line,omitempty"`
}

func (e FieldError) Error() string {
	var b strings.Builder
	b.WriteString(e.Path)
	if e.Line > 0 {
		if e.Path != "" {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "(line %d)", e.Line)
	}
	if b.Len() > 0 {
		b.WriteString(": ")
	}
	b.WriteString(e.Problem)
	return b.String()
}

// Errors are all the problems found in a document, or the first of very many.
// errors.As finds them through any wrapping.
type Errors []FieldError

func (e Errors) Error() string {
	all := make([]string, len(e))
	for i, one := range e {
		all[i] = one.Error()
	}
	return "policy: " + strings.Join(all, "; ")
}

// add notes a problem, as far as there is room for it.
func (e *Errors) add(path string, line int, format string, args ...any) {
	switch {
	case len(*e) < maxErrors:
		*e = append(*e, FieldError{Path: path, Problem: fmt.Sprintf(format, args...), Line: line})
	case len(*e) == maxErrors:
		*e = append(*e, FieldError{Problem: fmt.Sprintf("there are more problems; only the first %d are listed", maxErrors)})
	}
}

// err is the list as an error: nil when it is empty.
func (e Errors) err() error {
	if len(e) == 0 {
		return nil
	}
	return e
}

// join appends a key to a path. A key that is no plain word, or is long, is quoted and cut.
func join(path, key string) string {
	key = shorten(key)
	if path == "" {
		return key
	}
	return path + "." + key
}

// shorten makes text from a document fit to be shown: bounded, and quoted unless it is a plain word.
func shorten(s string) string {
	const longest = 64
	cut := len(s) > longest
	if cut {
		s = s[:longest]
	}
	plain := s != ""
	for i := 0; i < len(s) && plain; i++ {
		c := s[i]
		plain = c == '_' || c == '-' || c == '+' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
	}
	if !plain {
		s = strconv.Quote(s)
	}
	if cut {
		s += "…"
	}
	return s
}

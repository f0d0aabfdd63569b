package policy

import (
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// numberForm is JSON's form of a number: no hex, no underscores, no leading zeros, no infinities.
var numberForm = regexp.MustCompile(`^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$`)

// nameForm is what routes, upstreams, plans and users may be called. Names become
// parts of NATS subjects, Redis keys and metric labels as they are.
var nameForm = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)

const nameProblem = "a name is 1 to 64 of a-z, 0-9, _ and -, and begins with a letter or digit"

// decoder fills a struct from a tree, strictly: every value has the right shape
// and is within bounds, every key is known.
type decoder struct {
	// lenient drops unknown keys into dropped instead of refusing them.
	lenient bool
	dropped []string
	errs    Errors
}

// decode reads n into the struct that out points to.
func (d *decoder) decode(n *node, out any) error {
	d.value(n, reflect.ValueOf(out).Elem(), "", bound{})
	return d.errs.err()
}

func (d *decoder) value(n *node, v reflect.Value, path string, b bound) {
	if v.Kind() == reflect.Pointer {
		v.Set(reflect.New(v.Type().Elem()))
		v = v.Elem()
	}
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			d.time(n, v, path)
		} else if d.want(isMap, n, path) {
			d.object(n, v, path)
		}
	case reflect.Map:
		if d.want(isMap, n, path) {
			d.named(n, v, path)
		}
	case reflect.Slice:
		if d.want(isList, n, path) {
			v.Set(reflect.MakeSlice(v.Type(), len(n.items), len(n.items)))
			for i, item := range n.items {
				d.value(item, v.Index(i), index(path, i), b)
			}
		}
	case reflect.String:
		if d.want(isText, n, path) {
			v.SetString(n.text)
		}
	case reflect.Bool:
		if d.want(isBool, n, path) {
			v.SetBool(n.text == "true")
		}
	case reflect.Int, reflect.Int64:
		if x, ok := d.number(n, path, b); !ok {
			return
		} else if x != math.Trunc(x) {
			d.errs.add(path, n.line, "must be a whole number, not %s", shorten(n.text))
		} else {
			v.SetInt(int64(x)) // exact: every bound of a whole number is below 2^53
		}
	case reflect.Float64:
		if x, ok := d.number(n, path, b); ok {
			v.SetFloat(x)
		}
	}
}

func (d *decoder) time(n *node, v reflect.Value, path string) {
	if !d.want(isText, n, path) {
		return
	}
	at, err := time.Parse(time.RFC3339, n.text)
	if err != nil {
		d.errs.add(path, n.line, "must be a time such as 2030-12-31T23:59:59Z, not %s", shorten(n.text))
		return
	}
	v.Set(reflect.ValueOf(at.UTC()))
}

func (d *decoder) want(k kind, n *node, path string) bool {
	if n.kind == k {
		return true
	}
	if n.kind == isNull {
		d.errs.add(path, n.line, "has no value; give it %s or leave the key out", k)
	} else {
		d.errs.add(path, n.line, "must be %s, not %s", k, n.kind)
	}
	return false
}

func (d *decoder) number(n *node, path string, b bound) (float64, bool) {
	if !d.want(isNumber, n, path) {
		return 0, false
	}
	// A number too large for a float is infinite here, and out of bounds like any other.
	x, err := strconv.ParseFloat(n.text, 64)
	if !numberForm.MatchString(n.text) || (err != nil && !math.IsInf(x, 0)) {
		d.errs.add(path, n.line, "must be a finite decimal number, not %s", shorten(n.text))
		return 0, false
	}
	if p := b.problem(x); p != "" {
		d.errs.add(path, n.line, "%s, not %s", p, shorten(n.text))
		return 0, false
	}
	return x, true
}

func (d *decoder) object(n *node, v reflect.Value, path string) {
	fields := fieldsOf(v.Type())
	for _, e := range n.entries {
		at := join(path, e.key)
		f, known := fields.byKey[e.key]
		switch {
		case known:
			d.value(e.value, v.FieldByIndex(f), at, bounds[e.key])
		case d.lenient:
			d.dropped = append(d.dropped, at)
		default:
			d.errs.add(at, e.line, "unknown key; the keys here are %s", fields.list)
		}
	}
}

func (d *decoder) named(n *node, v reflect.Value, path string) {
	v.Set(reflect.MakeMapWithSize(v.Type(), len(n.entries)))
	for _, e := range n.entries {
		at := join(path, e.key)
		if !nameForm.MatchString(e.key) {
			d.errs.add(at, e.line, nameProblem)
			continue
		}
		elem := reflect.New(v.Type().Elem()).Elem()
		d.value(e.value, elem, at, bound{})
		v.SetMapIndex(reflect.ValueOf(e.key), elem)
	}
}

// fields are a struct's by JSON key, embedded structs included, as encoding/json has them.
type fields struct {
	byKey map[string][]int
	list  string // the keys, for messages
}

var fieldCache sync.Map // reflect.Type → *fields

func fieldsOf(t reflect.Type) *fields {
	if f, ok := fieldCache.Load(t); ok {
		return f.(*fields)
	}
	f := &fields{byKey: make(map[string][]int)}
	var keys []string
	for _, sf := range reflect.VisibleFields(t) {
		key, _, _ := strings.Cut(sf.Tag.Get("json"), ",")
		if key == "" || sf.Anonymous {
			continue
		}
		f.byKey[key] = sf.Index
		keys = append(keys, key)
	}
	slices.Sort(keys)
	f.list = strings.Join(keys, ", ")
	fieldCache.Store(t, f)
	return f
}

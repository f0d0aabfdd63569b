package policy

import "reflect"

// Keys lists every key of a policy, and of its numbers whether they have a bound.
func Keys() (all []string, bounded map[string]bool) {
	bounded = make(map[string]bool)
	var walk func(t reflect.Type)
	walk = func(t reflect.Type) {
		switch t.Kind() {
		case reflect.Pointer, reflect.Map, reflect.Slice:
			walk(t.Elem())
		case reflect.Struct:
			fields := fieldsOf(t)
			for key, at := range fields.byKey {
				all = append(all, key)
				f := t.FieldByIndex(at).Type
				if f.Kind() == reflect.Pointer {
					f = f.Elem()
				}
				switch f.Kind() {
				case reflect.Int, reflect.Int64, reflect.Float64:
					_, bounded[key] = bounds[key]
				default:
					walk(f)
				}
			}
		}
	}
	walk(reflect.TypeFor[Policy]())
	walk(reflect.TypeFor[change]())
	return all, bounded
}

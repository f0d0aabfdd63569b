package policy

import (
	"path"
	"strings"
)

// anyMethod stands for every method that has no route of its own at the same path.
const anyMethod = ""

// paths are the routes of one host.
type paths struct {
	// deepest is the number of segments of the longest path: looking further
	// into a request's path than that finds nothing.
	deepest int
	byPath  map[string]map[string]*Rules // path → method → route
}

func (t *Table) addRoute(r Route, rules *Rules) {
	p, ok := t.hosts[r.Host]
	if !ok {
		p.byPath = make(map[string]map[string]*Rules)
	}
	p.deepest = max(p.deepest, segments(r.Path))
	t.hosts[r.Host] = p

	if p.byPath[r.Path] == nil {
		p.byPath[r.Path] = make(map[string]*Rules)
	}
	methods := r.Methods
	if len(methods) == 0 {
		methods = []string{anyMethod}
	}
	for _, m := range methods {
		p.byPath[r.Path][m] = rules
	}
}

// Match finds the route of a request, or nil: among the routes of its host
// first, then among those of any host, the one with the longest path that is
// the request's or above it by whole segments, and of those at one path the one
// that names the method. host may carry a port, and any case. requestPath is
// decoded; it is cleaned here, so what is forwarded to the upstream should be
// cleaned the same way, or the upstream sees another path than was matched.
func (t *Table) Match(method, host, requestPath string) *Rules {
	if requestPath == "" || requestPath[0] != '/' {
		requestPath = "/" + requestPath
	}
	requestPath = path.Clean(requestPath)
	if len(t.hosts) > 1 || t.hosts[""].byPath == nil {
		if name := hostname(host); name != "" {
			if r := t.hosts[name].match(method, requestPath); r != nil {
				return r
			}
		}
	}
	return t.hosts[""].match(method, requestPath)
}

func (p paths) match(method, requestPath string) *Rules {
	if p.byPath == nil {
		return nil
	}
	for at := firstSegments(requestPath, p.deepest); ; {
		if methods := p.byPath[at]; methods != nil {
			if r := methods[method]; r != nil {
				return r
			}
			if r := methods[anyMethod]; r != nil {
				return r
			}
		}
		if at == "/" {
			return nil
		}
		at = at[:max(strings.LastIndexByte(at, '/'), 1)]
	}
}

// segments counts those of a clean path: 0 for "/", 2 for "/a/b".
func segments(p string) int {
	if p == "/" {
		return 0
	}
	return strings.Count(p, "/")
}

// firstSegments cuts a clean path to its first n segments. It bounds the work
// of a match: each step up hashes the whole path again.
func firstSegments(p string, n int) string {
	if n == 0 {
		return "/"
	}
	for i := 1; i < len(p); i++ {
		if p[i] == '/' {
			if n--; n == 0 {
				return p[:i]
			}
		}
	}
	return p
}

// hostname is a Host header without its port, brackets and final dot, in lower case.
func hostname(host string) string {
	if strings.HasPrefix(host, "[") {
		host, _, _ = strings.Cut(host[1:], "]")
	} else if i := strings.IndexByte(host, ':'); i >= 0 && strings.IndexByte(host[i+1:], ':') < 0 {
		host = host[:i]
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

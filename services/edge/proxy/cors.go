package proxy

import (
	"net/http"
	"strings"
	"sync"

	"github.com/rs/cors"

	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

const corsPrefix = "Access-Control-"

// exposed are the edge's own headers that pages may read.
var exposed = append([]string{"Retry-After", "X-Graceful-Degradation", "X-Request-Id"}, told...)

// origins keeps what is made of each route's CORS for as long as a policy is in force.
type origins struct {
	mu    sync.Mutex
	table *policy.Table
	made  map[*policy.CORS]*cors.Cors
}

// of gives the handler of a route's CORS, which is not nil.
func (o *origins) of(table *policy.Table, c *policy.CORS) *cors.Cors {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.table != table {
		o.table, o.made = table, make(map[*policy.CORS]*cors.Cors)
	}
	made := o.made[c]
	if made == nil {
		made = cors.New(cors.Options{
			AllowedOrigins:   c.AllowedOrigins,
			AllowedMethods:   c.AllowedMethods,
			AllowedHeaders:   c.AllowedHeaders,
			ExposedHeaders:   append(exposed[:len(exposed):len(exposed)], c.ExposeHeaders...),
			AllowCredentials: c.AllowCredentials,
			MaxAge:           int(c.MaxAgeSeconds),
		})
		o.made[c] = made
	}
	return made
}

// preflight answers a browser's question whether a page may send a request to a route
// that has CORS. It costs nothing, and no store is asked.
func (h *Handler) preflight(w *recorder, r *http.Request) (answered bool) {
	method := r.Header.Get("Access-Control-Request-Method")
	if r.Method != http.MethodOptions || method == "" || r.Header.Get("Origin") == "" {
		return false
	}
	table := h.engine.Table()
	if table == nil {
		return false
	}
	route := table.Match(method, r.Host, r.URL.Path)
	if route == nil || route.CORS == nil {
		return false
	}
	w.decision = &admission.Decision{Route: route}
	h.metrics.requests.WithLabelValues(route.Name, "preflight").Inc()
	w.Header().Set(headerRequestID, w.id)
	h.origins.of(table, route.CORS).HandlerFunc(w, r)
	return true
}

// allowOrigin makes the answer to r readable for the pages that may read it, and for no others.
func (h *Handler) allowOrigin(w *recorder, r *http.Request, d *admission.Decision) {
	if d.Route == nil || d.Route.CORS == nil {
		return
	}
	allowed := h.origins.of(h.engine.Table(), d.Route.CORS)
	w.finalize = func() {
		for name := range w.Header() { // the upstream's
			if strings.HasPrefix(name, corsPrefix) {
				delete(w.Header(), name)
			}
		}
		allowed.HandlerFunc(headerOnly{w.ResponseWriter}, r)
	}
}

// headerOnly is a ResponseWriter of which only the header is written.
type headerOnly struct{ http.ResponseWriter }

func (headerOnly) WriteHeader(int)           {}
func (headerOnly) Write([]byte) (int, error) { return 0, nil }

package controlplane

import (
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"

	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/pkg/rules"
)

const (
	// bodyTimeout bounds how long a request's body may take to arrive, answerTimeout the whole exchange.
	bodyTimeout   = 10 * time.Second
	answerTimeout = 30 * time.Second
)

// routes is the admin API as HTTP serves it.
func (s *Service) routes() http.Handler {
	api := s.api()
	api.Get("/api/ws", s.serveWebSocket)
	return s.recoverer(deadlines(s.authenticated(api)))
}

// caller is who sent a request, and how.
type caller struct {
	// by is what is known of the caller, via the way it came.
	by, via string
	// actor and reason are the caller's own words for the audit log.
	actor, reason string
}

const (
	actorHeader  = "X-Admin-Actor"
	reasonHeader = "X-Admin-Reason"
)

func callerOf(r *http.Request, by, via string) caller {
	return caller{by, via, oneLine(r.Header.Get(actorHeader)), oneLine(r.Header.Get(reasonHeader))}
}

// event begins the audit event of what the caller does.
func (c caller) event(action, target string) events.Audit {
	return events.Audit{Action: action, By: c.by, Via: c.via, Result: "ok", Target: target, Actor: c.actor, Reason: c.reason}
}

type callerKey struct{}

func withCaller(ctx context.Context, c caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// operation is one request of the API. serve's reply is written as JSON.
type operation struct {
	method, path string
	// action names it in the audit log; "" for what only reads, and for changes of the config, which
	// are audited with what they changed.
	action string
	serve  func(*Service, *call) (reply any, refusal *problem)
}

// call is one request under way.
type call struct {
	caller
	*http.Request
	w    http.ResponseWriter
	body []byte
	// target and detail are for the audit log.
	target, detail string
	status         int
	written        bool // the answer is written already
}

// operations is the whole API but its WebSocket; openapi.yaml describes it.
var operations = []operation{
	{http.MethodPost, "/api/control", "", (*Service).postControl},
	{http.MethodGet, "/api/config", "", (*Service).getConfig},
	{http.MethodPut, "/api/config", "", (*Service).putConfig},
	{http.MethodGet, "/api/config/versions", "", (*Service).getVersions},
	{http.MethodGet, "/api/config/versions/{version}", "", (*Service).getVersion},
	{http.MethodGet, "/api/config/diff", "", (*Service).getDiff},
	{http.MethodPost, "/api/config/rollback", "", (*Service).postRollback},
	{http.MethodGet, "/api/status", "", (*Service).getStatus},
	{http.MethodGet, "/api/doctor", "", (*Service).getDoctor},
	{http.MethodGet, "/api/openapi.yaml", "", (*Service).getOpenAPI},

	{http.MethodGet, "/api/users", "", (*Service).getUsers},
	{http.MethodPost, "/api/users", "user.create", (*Service).postUser},
	{http.MethodGet, "/api/users/{user}", "", (*Service).getUser},
	{http.MethodPatch, "/api/users/{user}", "user.update", (*Service).patchUser},
	{http.MethodDelete, "/api/users/{user}", "user.delete", (*Service).deleteUser},
	{http.MethodPost, "/api/users/{user}/keys", "key.create", (*Service).postKey},
	{http.MethodDelete, "/api/users/{user}/keys/{key}", "key.delete", (*Service).deleteKey},
	{http.MethodPut, "/api/users/{user}/overrides/{route}", "override.put", (*Service).putOverride},
	{http.MethodDelete, "/api/users/{user}/overrides/{route}", "override.delete", (*Service).deleteOverride},
	{http.MethodGet, "/api/plans", "", (*Service).getPlans},
	{http.MethodPut, "/api/plans/{plan}", "plan.put", (*Service).putPlan},
	{http.MethodDelete, "/api/plans/{plan}", "plan.delete", (*Service).deletePlan},

	{http.MethodGet, "/api/clients/{client}", "", (*Service).getClient},
	{http.MethodPost, "/api/clients/{client}/reset", "client.reset", (*Service).resetClient},
	{http.MethodPost, "/api/clients/{client}/grant", "client.grant", (*Service).grantClient},
	{http.MethodPost, "/api/clients/{client}/raise", "client.raise", (*Service).raiseClient},
	{http.MethodPost, "/api/clients/{client}/block", "client.block", (*Service).blockClient},
	{http.MethodPost, "/api/clients/{client}/unblock", "client.unblock", (*Service).unblockClient},
}

// api is the operations alone: whoever calls it has authenticated the caller.
func (s *Service) api() *chi.Mux {
	r := chi.NewRouter()
	r.Use(middleware.GetHead)
	for _, op := range operations {
		r.Method(op.method, op.path, s.handle(op))
	}
	r.NotFound(func(w http.ResponseWriter, _ *http.Request) {
		answer(w, refuse(http.StatusNotFound, "there is nothing here; GET /api/openapi.yaml says what there is"))
	})
	r.MethodNotAllowed(func(w http.ResponseWriter, req *http.Request) {
		var allowed []string
		for _, m := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
			if r.Match(chi.NewRouteContext(), m, req.URL.Path) {
				allowed = append(allowed, m)
				if m == http.MethodGet {
					allowed = append(allowed, http.MethodHead)
				}
			}
		}
		slices.Sort(allowed)
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		answer(w, refuse(http.StatusMethodNotAllowed, "%s is not understood here; use %s", method(req), strings.Join(allowed, ", ")))
	})
	return r
}

// handle reads a request, runs its operation, audits it and answers.
func (s *Service) handle(op operation) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		c := &call{Request: r, w: w, status: http.StatusOK}
		c.caller, _ = r.Context().Value(callerKey{}).(caller)
		if op.method != http.MethodGet {
			var refusal *problem
			if c.body, refusal = s.readBody(w, r); refusal != nil {
				answer(w, refusal)
				return
			}
		}
		var reply any
		refusal := c.checkNames()
		if refusal == nil {
			reply, refusal = op.serve(s, c)
		}
		if op.action != "" {
			a := c.event(op.action, c.target)
			a.Detail = c.detail
			if refusal != nil {
				a.Result, a.Detail = refusal.result(), refusal.Detail
			}
			s.audit(a)
		}
		switch {
		case refusal != nil:
			answer(w, refusal)
		case c.written:
		case reply == nil:
			w.WriteHeader(c.status)
		default:
			respond(w, c.status, "application/json", reply)
		}
	}
}

// readBody is the body of a request that changes something.
func (s *Service) readBody(w http.ResponseWriter, r *http.Request) ([]byte, *problem) {
	_, recorded := w.(*recorder)
	if !recorded && (r.ContentLength != 0 || r.Method == http.MethodPost) {
		// Nothing but JSON and YAML: what a foreign page can send unasked is a form or plain text.
		kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
		if err != nil || kind != "application/json" && (kind != "application/yaml" || r.Method != http.MethodPut) {
			return nil, refuse(http.StatusUnsupportedMediaType, "Content-Type must be application/json")
		}
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, policy.MaxDocument))
	if err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			return nil, refuse(http.StatusRequestEntityTooLarge, "the body has more than %d bytes", tooLarge.Limit)
		}
		return nil, refuse(http.StatusBadRequest, "the body could not be read")
	}
	if recorded {
		return body, nil
	}
	// The server goes on reading, to see the client leave; that takes as long as the change.
	if err := http.NewResponseController(w).SetReadDeadline(time.Time{}); err != nil {
		return nil, refuse(http.StatusInternalServerError, "this connection takes no deadlines")
	}
	return body, nil
}

// param is a part of the path, decoded.
func (c *call) param(name string) string {
	raw := chi.URLParam(c.Request, name)
	if text, err := url.PathUnescape(raw); err == nil {
		return text
	}
	return raw
}

// checkNames refuses names that nobody can have before a store is asked: to NATS some of them are patterns,
// and PostgreSQL takes some for no text.
func (c *call) checkNames() *problem {
	if user := c.param("user"); user != "" {
		if err := rules.ValidateName(user); err != nil {
			return refuse(http.StatusBadRequest, "%v", err)
		}
	}
	if plan := c.param("plan"); plan != "" && !policy.ValidName(plan) {
		return refuse(http.StatusBadRequest, "plan: %s", policy.NameProblem)
	}
	return nil
}

// decode reads the body strictly; an empty one is an empty object.
func (c *call) decode(into any) *problem {
	if len(c.body) == 0 {
		return nil
	}
	if err := policy.Decode(c.body, into); err != nil {
		return invalid(err)
	}
	return nil
}

// authenticated lets through whom the gate lets through.
func (s *Service) authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/ws" { // browsers can't set its header: it has a gate of its own
			next.ServeHTTP(w, r)
			return
		}
		peer, refusal, fresh := s.gate.http(r, time.Now())
		if refusal == nil {
			next.ServeHTTP(w, r.WithContext(withCaller(r.Context(), callerOf(r, peer, "http"))))
			return
		}
		s.turnedAway(peer, "http", actionOf(r.Method, r.URL.Path), refusal, fresh)
		if refusal.Status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", tokenHeader)
		}
		answer(w, refusal)
	})
}

// turnedAway counts and, if it is worth it, audits a caller that the gate refused.
func (s *Service) turnedAway(by, via, action string, refusal *problem, fresh bool) {
	s.metrics.refused.WithLabelValues(via, refusal.result()).Inc()
	if fresh {
		s.audit(events.Audit{Action: action, By: by, Via: via, Result: refusal.result(), Detail: refusal.Detail})
	}
}

// actionOf names what a refused request was about to do, in the audit log.
func actionOf(method, path string) string {
	switch {
	case method == http.MethodPost && path == "/api/control", strings.HasPrefix(path, "/api/config") && method != http.MethodGet:
		return actionChange
	case method != http.MethodGet && method != http.MethodHead:
		return "change"
	case path == "/api/status":
		return "status.read"
	case strings.HasPrefix(path, "/api/config"):
		return "config.read"
	default:
		return "read"
	}
}

// deadlines keeps a client that sends or reads slowly from holding a connection for ever.
func deadlines(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, now := http.NewResponseController(w), time.Now()
		if err := errors.Join(c.SetReadDeadline(now.Add(bodyTimeout)), c.SetWriteDeadline(now.Add(answerTimeout))); err != nil {
			answer(w, refuse(http.StatusInternalServerError, "this connection takes no deadlines"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// recoverer keeps a fault in one request from showing its insides or ending the process.
func (s *Service) recoverer(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			fault := recover()
			if fault == nil {
				return
			}
			if fault == http.ErrAbortHandler {
				panic(fault)
			}
			s.log.Error().Interface("fault", fault).Str("path", r.URL.Path).Msg("a request failed")
			answer(w, refuse(http.StatusInternalServerError, "the request could not be served"))
		}()
		next.ServeHTTP(w, r)
	})
}

func method(r *http.Request) string {
	if len(r.Method) > 16 {
		return "this method"
	}
	return r.Method
}

func etag(version uint64) string { return `"` + strconv.FormatUint(version, 10) + `"` }

// answer sends a refusal.
func answer(w http.ResponseWriter, p *problem) {
	if r, ok := w.(*recorder); ok {
		r.detail = p.Detail
	}
	if p.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt(p.RetryAfter, 10))
	}
	respond(w, p.Status, "application/problem+json", p)
}

func respond(w http.ResponseWriter, status int, kind string, body any) {
	h := w.Header()
	h.Set("Content-Type", kind)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	w.Write(append(toJSON(body), '\n'))
}

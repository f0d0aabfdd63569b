package controlplane

import (
	"errors"
	"io"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"

	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

const (
	// bodyTimeout bounds how long a request's body may take to arrive, answerTimeout the whole exchange.
	bodyTimeout   = 10 * time.Second
	answerTimeout = 30 * time.Second
)

// routes is the admin API.
func (s *Service) routes() http.Handler {
	r := chi.NewRouter()
	r.Use(s.recoverer, deadlines, middleware.GetHead)
	r.NotFound(func(w http.ResponseWriter, _ *http.Request) {
		answer(w, refuse(http.StatusNotFound, "there is nothing here; the API is POST /api/control, GET /api/config and GET /api/status"))
	})
	r.MethodNotAllowed(func(w http.ResponseWriter, req *http.Request) {
		var allowed []string
		for m, serves := range map[string]string{http.MethodGet: "GET, HEAD", http.MethodPost: "POST"} {
			if r.Match(chi.NewRouteContext(), m, req.URL.Path) {
				allowed = append(allowed, serves)
			}
		}
		slices.Sort(allowed)
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		answer(w, refuse(http.StatusMethodNotAllowed, "%s is not understood here; use %s", method(req), strings.Join(allowed, ", ")))
	})
	r.Group(func(r chi.Router) {
		r.Use(s.authenticated)
		r.Post("/api/control", s.postControl)
		r.Get("/api/config", s.getConfig)
		r.Get("/api/status", s.getStatus)
	})
	return r
}

func (s *Service) postControl(w http.ResponseWriter, r *http.Request) {
	// Nothing but JSON: what a foreign page can send unasked is a form or plain text.
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		answer(w, refuse(http.StatusUnsupportedMediaType, "Content-Type must be application/json"))
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, policy.MaxDocument))
	if err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			answer(w, refuse(http.StatusRequestEntityTooLarge, "the body has more than %d bytes", tooLarge.Limit))
		} else {
			answer(w, refuse(http.StatusBadRequest, "the body could not be read"))
		}
		return
	}
	// The server goes on reading, to see the client leave; that takes as long as the change.
	if err := http.NewResponseController(w).SetReadDeadline(time.Time{}); err != nil {
		answer(w, refuse(http.StatusInternalServerError, "this connection takes no deadlines"))
		return
	}
	reply, refusal := s.change(r.Context(), change{
		by: remote(r).String(), via: "http", body: body, ifMatch: r.Header.Get("If-Match"),
	})
	if refusal != nil {
		answer(w, refusal)
		return
	}
	w.Header().Set("ETag", etag(reply.Version))
	respond(w, http.StatusOK, "application/json", reply)
}

func (s *Service) getConfig(w http.ResponseWriter, r *http.Request) {
	cur := s.versions.current()
	if cur == nil {
		answer(w, unavailable("no config is known yet"))
		return
	}
	tag := etag(cur.Version)
	w.Header().Set("ETag", tag)
	if r.Header.Get("If-None-Match") == tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	respond(w, http.StatusOK, "application/json", cur.ConfigVersion)
}

func (s *Service) getStatus(w http.ResponseWriter, _ *http.Request) {
	respond(w, http.StatusOK, "application/json", s.status.now(s.versions.current(), s.bus.Connected()))
}

// authenticated lets through whom the gate lets through.
func (s *Service) authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		peer, refusal, fresh := s.gate.http(r, time.Now())
		if refusal == nil {
			next.ServeHTTP(w, r)
			return
		}
		s.metrics.refused.WithLabelValues("http", refusal.result()).Inc()
		if fresh {
			s.audit(events.Audit{Action: action(r), By: peer, Via: "http", Result: refusal.result(), Detail: refusal.Detail})
		}
		if refusal.Status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", tokenHeader)
		}
		answer(w, refusal)
	})
}

// action names what a request was about to do, in the audit log.
func action(r *http.Request) string {
	switch {
	case r.Method == http.MethodPost:
		return actionChange
	case r.URL.Path == "/api/status":
		return "status.read"
	default:
		return "config.read"
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

package proxy

import (
	"fmt"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// recorder is the ResponseWriter of a request. It remembers the status, spells the edge's header
// names as documented, and keeps them out of the upstream's informational answers, of which 100 ends here.
type recorder struct {
	http.ResponseWriter
	id       string
	status   int
	decision *admission.Decision
	old      bool   // HTTP/1.0, which has no informational answers
	finalize func() // has the last word on the header of the answer; may be nil
}

// Unwrap lets http.ResponseController flush and hijack.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *recorder) WriteHeader(status int) {
	if status == http.StatusContinue {
		return // the server says so, once, when the body is read; the upstream's is the transport's
	}
	if status >= 100 && status < 200 && status != http.StatusSwitchingProtocols {
		if w.old {
			return
		}
		stripOurs(w.Header())
	} else if w.status == 0 {
		w.status = status
		if w.finalize != nil {
			w.finalize()
		}
		spell(w.Header())
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *recorder) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	return w.ResponseWriter.Write(p)
}

// begin gives a request its id and its recorder, and logs its end.
func (h *Handler) begin(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w := &recorder{ResponseWriter: rw, id: h.requestID(r), old: !r.ProtoAtLeast(1, 1), decision: &admission.Decision{}}
		start := time.Now()
		defer func() { // the reverse proxy ends broken streams by a panic
			h.metrics.answered(w.decision, w.status)
			e := h.access.Info()
			if e == nil {
				return
			}
			d := w.decision
			if d.Route != nil {
				e = e.Str("route", d.Route.Name).Str("client", d.Client.ID).Stringer("tier", d.Tier)
			}
			// Neither query nor headers: they may hold secrets.
			e.Str("request", w.id).Str("method", r.Method).Str("path", r.URL.Path).
				Int("status", w.status).Dur("took", time.Since(start)).Msg("request")
		}()
		next.ServeHTTP(w, r)
	})
}

// recover turns a panic into a 500 that says nothing of it.
func (h *Handler) recover(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			cause := recover()
			if cause == nil {
				return
			}
			rec := w.(*recorder)
			if cause != http.ErrAbortHandler {
				h.metrics.panics.Inc()
				h.log.Error().Str("request", rec.id).Str("panic", fmt.Sprint(cause)).Bytes("stack", debug.Stack()).Msg("request panicked")
				if rec.status == 0 {
					clear(w.Header()) // of an answer that is not to be
					writeProblem(w, rec.id, plainProblem(http.StatusInternalServerError, ""))
					return
				}
			}
			panic(http.ErrAbortHandler) // the answer has begun: only breaking the connection tells that it is not whole
		}()
		next.ServeHTTP(w, r)
	})
}

package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/admission"
	"github.com/aegisrate/aegisrate/services/edge/deferral"
)

const (
	// deferredPath is where a deferred request is asked for. It is the edge's own on every host.
	deferredPath = "/_aegis/deferred/"
	// deferredBody is how long the body of a request that is to be deferred may take.
	deferredBody = 5 * time.Second
	// longestRun bounds a deferred request's whole exchange.
	longestRun = 5 * time.Minute
	// headerKey makes a deferred request run at most once.
	headerKey = "Idempotency-Key"
)

// Deferrals store requests that run later; deferral.Queue is one. Its documentation has the errors.
type Deferrals interface {
	Add(ctx context.Context, o deferral.Offer) (id string, err error)
	Get(ctx context.Context, client, id string) (deferral.Status, error)
	Cancel(ctx context.Context, client, id string) error
}

// maxPolls bounds the clients whose questions are counted.
const maxPolls = 10_000

// polls bounds how often a client may ask after its deferred requests: each question goes to NATS.
var polls = bucket.Effective(bucket.Limit{Kind: bucket.TokenBucket, Capacity: 20, Rate: 10 * bucket.One}, bucket.One)

// errNotDeferred says, with its text, why a request can't run later.
type errNotDeferred string

func (e errNotDeferred) Error() string { return string(e) }

// deferRequest stores a yellow request and answers 202, or refuses it.
func (h *Handler) deferRequest(w *recorder, r *http.Request, d *admission.Decision) {
	id, err := h.storeRequest(w, r, d)
	var why errNotDeferred
	switch {
	case err == nil:
		h.metrics.yellow.WithLabelValues(d.Route.Name, "deferred").Inc()
		setDecision(w.Header(), d)
		w.Header().Set(headerDegradation, "Deferred")
		w.Header().Set("Location", deferredPath+id)
		writeJSON(w, w.id, "application/json", http.StatusAccepted, deferred{
			Status: http.StatusAccepted, State: events.DeferralQueued, Location: deferredPath + id,
			Detail: fmt.Sprintf("limit %s is used up; the request is stored and runs when the limit allows", d.LimitName),
			Limit:  d.LimitName, Route: d.Route.Name, Tier: d.Tier.String(), RetryAfter: d.RetryAfter, RequestID: w.id,
		})
		return
	case errors.Is(err, deferral.ErrKeyReused):
		setDecision(w.Header(), d)
		writeProblem(w, w.id, plainProblem(http.StatusUnprocessableEntity, "the Idempotency-Key was used for another request"))
		return
	case errors.As(err, &why):
	case errors.Is(err, deferral.ErrFull):
		why = "too many requests wait already"
	default:
		h.log.Warn().Err(err).Str("request", w.id).Msg("a request can't be deferred")
		why = "it can't be stored to run later"
	}
	h.metrics.yellow.WithLabelValues(d.Route.Name, "refused").Inc()
	setDecision(w.Header(), d)
	p := limitProblem(typeQuotaExceeded, "Quota exceeded",
		fmt.Sprintf("limit %s of %d tokens is used up, and %s; retry after %d s", d.LimitName, d.Limit, why, d.RetryAfter), d)
	p.Route = d.Route.Name
	writeProblem(w, w.id, p)
}

// storeRequest stores a request to run later.
func (h *Handler) storeRequest(w *recorder, r *http.Request, d *admission.Decision) (id string, err error) {
	switch {
	case h.deferrals == nil:
		return "", errNotDeferred("nothing runs later here")
	case !d.Route.Defers(r.Method):
		return "", errNotDeferred(r.Method + " requests don't run later on this route")
	case r.Header.Get("Upgrade") != "" || len(r.Trailer) > 0:
		return "", errNotDeferred("such requests can't run later")
	case r.ContentLength > deferral.MaxBody:
		return "", errNotDeferred("its body is too large to be stored")
	}
	var body []byte
	if r.ContentLength != 0 {
		// Where no deadline can be set, the server has its own.
		_ = http.NewResponseController(w.ResponseWriter).SetReadDeadline(time.Now().Add(deferredBody))
		if body, err = io.ReadAll(http.MaxBytesReader(w.ResponseWriter, r.Body, deferral.MaxBody)); err != nil {
			return "", errNotDeferred("its body could not be read to its end, or is too large to be stored")
		}
	}
	header := r.Header.Clone()
	header.Del("Expect")
	return h.deferrals.Add(r.Context(), deferral.Offer{
		Client: d.Client.ID, Route: d.Route.Name, Key: strings.Join(r.Header.Values(headerKey), ", "),
		Request: deferral.Request{
			ID: w.id, Method: r.Method, Host: r.Host, URI: r.URL.RequestURI(), Header: header, Body: body, Peer: r.RemoteAddr,
		},
	})
}

// deferred is the body of a 202.
type deferred struct {
	Status     int                  `json:"status"`
	State      events.DeferralState `json:"state"`
	Location   string               `json:"location"`
	Detail     string               `json:"detail"`
	Limit      string               `json:"limit,omitempty"`
	Route      string               `json:"route"`
	Tier       string               `json:"tier,omitempty"`
	RetryAfter int64                `json:"retry_after"`
	RequestID  string               `json:"request_id"`
}

// serveDeferred tells the owner of a deferred request what has become of it, or cancels it.
func (h *Handler) serveDeferred(rw http.ResponseWriter, r *http.Request) {
	w := rw.(*recorder)
	table := h.engine.Table()
	if h.deferrals == nil || table == nil {
		writeProblem(w, w.id, plainProblem(http.StatusNotFound, "no request is deferred here"))
		return
	}
	client := h.engine.Identify(view(r))
	asked, err := h.polls.Check(r.Context(), store.Check{
		Client: client.ID, Limits: []store.Limit{{Scope: "deferred", Spec: polls}}, Cost: bucket.One,
	})
	if err != nil || asked.Tier != bucket.Green {
		p := plainProblem(http.StatusTooManyRequests, "asked too often; ask again after a second")
		w.Header().Set(headerRetryAfter, "1")
		writeProblem(w, w.id, p)
		return
	}
	id := chi.URLParam(r, "id")
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		s, err := h.deferrals.Get(r.Context(), client.ID, id)
		if err == nil {
			h.allowOrigin(w, r, &admission.Decision{Route: table.Route(s.Route)})
			h.writeStatus(w, r, id, s)
			return
		}
		h.writeDeferralError(w, err)
	case http.MethodDelete:
		if err := h.deferrals.Cancel(r.Context(), client.ID, id); err != nil {
			h.writeDeferralError(w, err)
			return
		}
		w.Header().Set(headerRequestID, w.id)
		w.WriteHeader(http.StatusNoContent)
	default:
		w.Header().Set("Allow", "GET, HEAD, DELETE")
		writeProblem(w, w.id, plainProblem(http.StatusMethodNotAllowed, "a deferred request can be asked for, and cancelled"))
	}
}

// writeStatus answers with the state of a deferred request, and with its answer once it has one.
func (h *Handler) writeStatus(w *recorder, r *http.Request, id string, s deferral.Status) {
	header := w.Header()
	header.Set(headerDegradation, "Deferred")
	switch s.State {
	case events.DeferralDone:
		maps.Copy(header, s.Answer.Header)
		header.Set(headerDegradation, "Deferred")
		header.Set("Cache-Control", "private, no-store") // it is its owner's alone
		w.WriteHeader(s.Answer.Status)
		if r.Method != http.MethodHead {
			w.Write(s.Answer.Body) // a client that is gone needs no answer
		}
	case events.DeferralFailed:
		writeProblem(w, w.id, plainProblem(http.StatusBadGateway, s.Reason))
	case events.DeferralCancelled:
		writeProblem(w, w.id, plainProblem(http.StatusGone, "the request was cancelled"))
	default:
		header.Set(headerRetryAfter, "1")
		writeJSON(w, w.id, "application/json", http.StatusAccepted, deferred{
			Status: http.StatusAccepted, State: s.State, Location: deferredPath + id, Route: s.Route,
			Detail: "the request has not been answered yet; ask again", RetryAfter: 1, RequestID: w.id,
		})
	}
}

func (h *Handler) writeDeferralError(w *recorder, err error) {
	p := plainProblem(http.StatusServiceUnavailable, "deferred requests can't be looked up now")
	switch {
	case errors.Is(err, deferral.ErrNotFound):
		p = plainProblem(http.StatusNotFound, "there is no such request, or it has expired")
	case errors.Is(err, deferral.ErrTooLate):
		p = plainProblem(http.StatusConflict, "the request runs, or has run")
	default:
		w.Header().Set(headerRetryAfter, "1")
		p.RetryAfter = 1
	}
	writeProblem(w, w.id, p)
}

// errForgotten: the request's key is not its client's any more.
var errForgotten = errors.New("the client that sent it is not known by its credentials any more")

// Foresee implements deferral.Runner.
func (h *Handler) Foresee(ctx context.Context, client string, stored deferral.Request) (deferral.Prospect, error) {
	r, err := replayed(ctx, stored)
	if err != nil {
		return deferral.Prospect{}, err
	}
	p, err := h.engine.Foresee(ctx, view(r))
	if p.Action == admission.Unavailable || err != nil { // it waits for the policy, or the store
		return deferral.Prospect{Wait: time.Second}, nil
	}
	if err := stays(&p.Decision, client); err != nil {
		return deferral.Prospect{}, err
	}
	return deferral.Prospect{Wait: p.Wait, Each: p.Each}, nil
}

// stays reports why a deferred request will never run.
func stays(d *admission.Decision, client string) error {
	if d.Route != nil && d.Route.LLM != nil {
		return errors.New("the route takes LLM calls now, which are not put off")
	}
	switch d.Action {
	case admission.Forward, admission.Degrade, admission.Deny, admission.DenyReduced, admission.StoreAway, admission.Unavailable:
		if d.Client.ID != client {
			return errForgotten
		}
		return nil
	default:
		return errors.New(refusal(d).Detail)
	}
}

// Run implements deferral.Runner: the request is decided, charged and counted as any other.
func (h *Handler) Run(ctx context.Context, client string, stored deferral.Request) (_ deferral.Answer, again time.Duration, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			h.metrics.panics.Inc()
			err = fmt.Errorf("the edge failed: %v", cause)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, longestRun)
	defer cancel()
	r, err := replayed(ctx, stored)
	if err != nil {
		return deferral.Answer{}, 0, err
	}
	if h.engine.Table() == nil || h.engine.Identify(view(r)).ID != client { // nobody else pays for it
		return deferral.Answer{}, 0, errForgotten
	}
	d := h.engine.Decide(ctx, view(r))
	h.metrics.decided(&d)
	if err := stays(&d, client); err != nil {
		return deferral.Answer{}, 0, err
	}
	if d.Action != admission.Forward {
		return deferral.Answer{}, max(time.Duration(d.RetryAfter), 1) * time.Second, nil
	}
	kept := &keptAnswer{header: make(http.Header)}
	w := &recorder{ResponseWriter: kept, id: stored.ID, decision: &d}
	outcome := h.forward(w, r, &d, nil)
	h.metrics.answered(&d, w.status)
	switch {
	case kept.over:
		err = fmt.Errorf("it ran and was answered %d, but the answer has more than %d bytes and was not kept", w.status, deferral.MaxBody)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		err = fmt.Errorf("it ran for more than %v", longestRun)
	case outcome == events.OutcomeAborted: // there is no client to leave: the edge stops
		err = deferral.ErrInterrupted
	case outcome == events.OutcomeReset && w.status < 500:
		err = errors.New("it ran, and the upstream broke off its answer")
	}
	if err != nil {
		return deferral.Answer{}, 0, err
	}
	kept.header.Del("Connection")
	return deferral.Answer{Status: w.status, Header: kept.header, Body: kept.body.Bytes()}, 0, nil
}

// replayed is a stored request as its client sent it.
func replayed(ctx context.Context, stored deferral.Request) (*http.Request, error) {
	r, err := http.NewRequestWithContext(ctx, stored.Method, "/", bytes.NewReader(stored.Body))
	if err == nil {
		r.URL, err = url.ParseRequestURI(stored.URI)
	}
	if err != nil {
		return nil, fmt.Errorf("the stored request can't be read: %w", err)
	}
	r.Host, r.RequestURI, r.RemoteAddr = stored.Host, stored.URI, stored.Peer
	if len(stored.Header) > 0 {
		r.Header = stored.Header
	}
	return r, nil
}

// keptAnswer is a ResponseWriter that keeps an answer, within deferral.MaxBody.
type keptAnswer struct {
	header http.Header
	body   bytes.Buffer
	over   bool
}

func (k *keptAnswer) Header() http.Header { return k.header }
func (k *keptAnswer) WriteHeader(int)     {} // the recorder keeps it
func (k *keptAnswer) Flush()              {}

func (k *keptAnswer) Write(p []byte) (int, error) {
	if k.body.Len()+len(p) > deferral.MaxBody {
		k.over = true
		return 0, errors.New("the answer is too large to be kept")
	}
	return k.body.Write(p)
}

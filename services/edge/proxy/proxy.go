package proxy

import (
	"cmp"
	"context"
	"crypto/rand"
	"log"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/services/edge/admission"
	"github.com/aegisrate/aegisrate/services/edge/cache"
	"github.com/aegisrate/aegisrate/services/edge/llm"
)

// unreadBody is how long the body of a refused request is waited for: one that is on its way leaves the
// connection usable, one that never ends does not hold it.
const unreadBody = time.Second

// Options make a Handler.
type Options struct {
	Engine *admission.Engine
	// LLM holds the calls of LLM routes to their quotas; without it there must be no such route.
	LLM *llm.Limiter
	// AccessLog logs one request in so many; 0: none.
	AccessLog uint32
	// BodyTimeout bounds the wait for each part of a request body; 0: DefaultBodyTimeout.
	BodyTimeout time.Duration
	// Deferrals store what runs later; nil: yellow requests that get no stored answer are refused.
	Deferrals Deferrals
	// CacheBytes bounds the stored answers of routes with degrade: cache; 0: none are stored.
	CacheBytes int64
	Log        zerolog.Logger
	Registry   prometheus.Registerer
}

// Handler serves everything that clients ask of the edge.
type Handler struct {
	engine    *admission.Engine
	llm       *llm.Limiter
	router    http.Handler
	body      time.Duration // BodyTimeout
	upstreams transports
	origins   origins
	balancers balancers
	buffers   buffers
	cache     *cache.Cache
	deferrals Deferrals
	polls     store.Store
	small     smallBuffers
	metrics   *metrics
	access    zerolog.Logger
	log       zerolog.Logger
	errorLog  *log.Logger
	open      exchanges
}

// New makes the handler; Close ends it.
func New(o Options) *Handler {
	h := &Handler{
		engine:    o.Engine,
		body:      cmp.Or(o.BodyTimeout, DefaultBodyTimeout),
		cache:     cache.New(o.CacheBytes, time.Now),
		deferrals: o.Deferrals,
		polls:     memstore.New(o.Engine.Clock.Micros, memstore.AtMost(maxPolls)),
		llm:       o.LLM,
		access:    zerolog.Nop(),
		log:       o.Log,
	}
	h.metrics = newMetrics(o.Registry, h)
	if o.AccessLog > 0 {
		h.access = o.Log.Sample(&zerolog.BasicSampler{N: o.AccessLog})
	}
	h.errorLog = log.New(debugWriter{o.Log}, "", 0)

	router := chi.NewRouter()
	router.Use(h.begin, h.recover)
	router.HandleFunc(deferredPath+"{id}", h.serveDeferred)
	router.Handle("/*", http.HandlerFunc(h.serve))
	router.NotFound(h.serve)
	router.MethodNotAllowed(h.serve)
	h.router = router
	return h
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.router.ServeHTTP(w, r) }

// Close breaks off what is still under way, upgraded connections above all, and waits
// until each request has been finished in admission or ctx ends. The server must take
// no more requests.
func (h *Handler) Close(ctx context.Context) error {
	err := h.open.drain(ctx)
	h.upstreams.closeIdle()
	return err
}

// serve decides a request and answers or forwards it.
func (h *Handler) serve(rw http.ResponseWriter, r *http.Request) {
	w := rw.(*recorder)
	switch r.Method {
	case http.MethodConnect:
		writeProblem(w, w.id, plainProblem(http.StatusMethodNotAllowed, "the edge is no forward proxy"))
		return
	case "PRI": // half an HTTP/2 preface
		writeProblem(w, w.id, plainProblem(http.StatusMethodNotAllowed, "the method is reserved"))
		return
	}
	if !passable(r) {
		writeProblem(w, w.id, plainProblem(http.StatusBadRequest, "the target is no path on a host"))
		return
	}
	if h.preflight(w, r) {
		return
	}
	began := time.Now()
	d := h.engine.Decide(r.Context(), view(r))
	h.metrics.decision.Observe(time.Since(began).Seconds())
	w.decision = &d
	var call *llmCall
	if d.Action == admission.Forward && d.Route.LLM != nil {
		var p *problem
		if call, p = h.admitLLM(w, r, &d); p != nil {
			h.metrics.decided(&d)
			h.allowOrigin(w, r, &d)
			writeProblem(w, w.id, *p)
			return
		}
	}
	h.metrics.decided(&d)
	if d.Action != admission.Forward && r.ContentLength != 0 {
		// net/http reads a small rest of a body before it answers. Where no deadline can be set, it waits for none.
		_ = http.NewResponseController(w.ResponseWriter).SetReadDeadline(time.Now().Add(unreadBody))
	}
	h.allowOrigin(w, r, &d)
	switch d.Action {
	case admission.Forward:
		h.forward(w, r, &d, call)
	case admission.Degrade:
		h.degrade(w, r, &d)
	default:
		setDecision(w.Header(), &d)
		call.tell(w.Header())
		p := refusal(&d)
		if p.RetryAfter > 0 && d.RetryAfter == 0 {
			w.Header().Set(headerRetryAfter, "1")
		}
		writeProblem(w, w.id, p)
	}
}

// view is what admission needs to know of a request.
func view(r *http.Request) admission.Request {
	return admission.Request{
		Method: r.Method,
		Host:   r.Host,
		Path:   r.URL.Path,
		Header: r.Header,
		Length: r.ContentLength,
		Peer:   peer(r),
	}
}

func (h *Handler) trusts(r *http.Request) bool { return h.engine.Identifier.Trusts(peer(r)) }

// peer is the other end of the socket; the zero address where that is no IP socket.
func peer(r *http.Request) netip.Addr {
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	return ap.Addr()
}

// requestID is the id that a trusted proxy gave the request, else a new one.
func (h *Handler) requestID(r *http.Request) string {
	if id := r.Header.Get(headerRequestID); validID(id) && h.trusts(r) {
		return id
	}
	return rand.Text()
}

func validID(id string) bool {
	if id == "" || len(id) > 64 {
		return false
	}
	for _, c := range []byte(id) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '-' && c != '_' && c != '.' {
			return false
		}
	}
	return true
}

// exchanges are the requests under way.
type exchanges struct {
	mu     sync.Mutex
	next   uint64
	cancel map[uint64]func()
	over   chan struct{} // set by drain; closed when no exchange is left
}

// enter registers an exchange; leave must be called, once, when it is over.
func (e *exchanges) enter(cancel func()) (leave func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cancel == nil {
		e.cancel = make(map[uint64]func())
	}
	e.next++
	n := e.next
	e.cancel[n] = cancel
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.cancel, n)
		if e.over != nil && len(e.cancel) == 0 {
			close(e.over)
		}
	}
}

// drain cancels all exchanges and waits for them. No exchange may enter any more.
func (e *exchanges) drain(ctx context.Context) error {
	over := make(chan struct{})
	e.mu.Lock()
	left := len(e.cancel)
	if left > 0 {
		e.over = over
	}
	for _, cancel := range e.cancel {
		cancel()
	}
	e.mu.Unlock()
	if left == 0 {
		return nil
	}
	select {
	case <-over:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// debugWriter takes what net/http logs by itself.
type debugWriter struct{ log zerolog.Logger }

func (d debugWriter) Write(p []byte) (int, error) {
	d.log.Debug().Msg(string(p))
	return len(p), nil
}

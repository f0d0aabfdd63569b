package proxy

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge/admission"
	"github.com/aegisrate/aegisrate/services/edge/cache"
	"github.com/aegisrate/aegisrate/services/edge/llm"
)

var (
	errNoStatus        = errors.New("the upstream answers with a status that is none")
	errUpstreamTimeout = errors.New("no response head within the upstream's timeout")
	errBodyStalled     = errors.New("the client does not send its body")
	errDrained         = errors.New("the edge is shutting down")
)

// DefaultBodyTimeout is how long a client may take between two parts of its body.
const DefaultBodyTimeout = 30 * time.Second

// minBodyRate is how fast a body must come on average, after the time for a part of it, in bytes per second.
const minBodyRate = 512

// statusClientGone is what the log and the metrics say of a request whose client left before an answer.
const statusClientGone = 499

// smallFlush is how long a small answer of a declared length may wait for its rest.
const smallFlush = 10 * time.Millisecond

// exchange is one request on its way through an upstream.
type exchange struct {
	h      *Handler
	d      *admission.Decision
	id     string
	w      *recorder
	in     *http.Request   // as the client sent it
	client context.Context // ends when the client leaves
	ctx    context.Context // ends too when the upstream is late, or the edge drains
	start  time.Time
	wait   *patience
	proxy  httputil.ReverseProxy
	place  *url.URL // which of the upstream's
	llm    *llmCall

	reached atomic.Bool // a connection to the upstream was had
	body    *requestBody
	record  *cache.Recording // nil where the answer is not to be stored

	// What the upstream answered; set by the goroutine that serves.
	status   int
	latency  time.Duration
	duration time.Duration // 0 where the answer was broken off
	cost     string
	answer   *responseBody
	upgraded bool
	failure  events.Outcome // "" unless no answer could be passed on
}

// forward sends r to its upstream and streams the answer back. It finishes the
// request in admission, also where the reverse proxy ends in http.ErrAbortHandler.
func (h *Handler) forward(w *recorder, r *http.Request, d *admission.Decision, call *llmCall) (outcome events.Outcome) {
	ctx, cancel := context.WithCancelCause(r.Context())
	x := &exchange{h: h, d: d, id: w.id, w: w, client: r.Context(), start: time.Now(), llm: call}
	x.ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { x.reached.Store(true) },
	})
	x.wait = newPatience(d.Upstream.Timeout, func() { cancel(errUpstreamTimeout) })
	leave := h.open.enter(func() { cancel(errDrained) })
	place, free := h.balancers.pick(d.Route.Upstream, d.Upstream.URLs, call.routing())
	x.place = place
	defer func() {
		free()
		x.wait.end()
		x.body.over()
		cancel(nil)
		outcome = x.finish()
		x.settle(outcome, leave)
	}()

	r = r.WithContext(x.ctx)
	x.in = r
	if protocol := r.Header.Get("Upgrade"); protocol != "" && !mayUpgrade(protocol, d) {
		r.Header.Del("Upgrade")
	}
	if r.ContentLength != 0 {
		conn := http.NewResponseController(w)
		x.body = &requestBody{ReadCloser: http.MaxBytesReader(w.ResponseWriter, r.Body, d.Route.MaxBodyBytes+call.longer()), wait: x.wait, lastly: r.ProtoMajor == 1}
		x.body.client = newPatience(h.body, func() {
			cancel(errBodyStalled)
			_ = conn.SetReadDeadline(time.Now()) // who reads the body holds it
		})
		r.Body = x.body
		// Else the server would read the rest of the body before it passes on an answer that comes early.
		if err := conn.EnableFullDuplex(); err != nil {
			h.log.Debug().Err(err).Msg("body and answer can't stream at once")
		}
	}
	if d.Route.Degrade == policy.DegradeCache {
		x.record = h.cache.Begin(selects(r, d))
	}
	x.proxy = httputil.ReverseProxy{
		Rewrite:        x.rewrite,
		ModifyResponse: x.take,
		ErrorHandler:   x.fail,
		Transport:      h.upstreams.of(h.engine.Table(), d.Route.Upstream, d.Upstream.Connections),
		FlushInterval:  -1,
		BufferPool:     h.bufferPool(call),
		ErrorLog:       h.errorLog,
	}
	x.proxy.ServeHTTP(w, r)
	x.duration = time.Since(x.start)
	x.body.end(w)
	return "" // finish tells
}

// rewrite makes the upstream's request. Hop-by-hop and forwarding headers are gone from it already.
func (x *exchange) rewrite(pr *httputil.ProxyRequest) {
	pr.SetURL(x.place)
	if x.d.Upstream.PassHost {
		pr.Out.Host = pr.In.Host
	}
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery // nothing here was decided by it
	in, out := pr.In.Header, pr.Out.Header
	stripOurs(out)
	x.llm.prepare(out)
	if x.d.Client.ByKeyHeader {
		out.Del(admission.KeyHeader)
	}
	trusted := x.h.trusts(pr.In)
	if trusted {
		out["X-Forwarded-For"] = slices.Clone(in["X-Forwarded-For"])
	}
	for name := range out {
		if forwarding(name) && (!trusted || strings.Contains(name, "_")) {
			delete(out, name)
		}
	}
	pr.SetXForwarded()
	if trusted {
		for _, name := range [...]string{"X-Forwarded-Host", "X-Forwarded-Proto", "Forwarded"} {
			if v := in[name]; len(v) > 0 {
				out[name] = slices.Clone(v)
			}
		}
	}
	out.Set(headerRequestID, x.id)
	pr.Out.Trailer = nil
	if x.body != nil {
		pr.Out.Trailer = x.body.announce(pr.In.Trailer)
		// A body that the upstream has refused would be asked for nevertheless, for the sake of its connection.
		pr.Out.Close = in.Get("Expect") != ""
	}
}

// take looks at the upstream's head and makes it ours.
func (x *exchange) take(res *http.Response) error {
	x.wait.end()
	if res.StatusCode < 100 {
		return errNoStatus
	}
	x.latency = time.Since(x.start)
	x.status = res.StatusCode
	x.h.metrics.upstream.WithLabelValues(x.d.Route.Upstream).Observe(x.latency.Seconds())

	exposed := res.Header.Values(headerComputeCost)
	if len(exposed) > 1 {
		x.h.metrics.badCost.WithLabelValues(x.d.Route.Upstream).Inc()
	}
	x.cost = computeCost(res.Header)
	stripOurs(res.Header)
	stripOurs(res.Trailer)
	if res.StatusCode < 400 {
		x.invalidate(res.Header)
	}
	if len(res.Trailer) == 0 {
		x.record.Head(res.StatusCode, res.Header)
	}
	if x.d.Route.ExposeComputeCost && len(exposed) > 0 {
		res.Header[headerComputeCost] = exposed
	}
	// What the edge says goes to the client's header at once: the reverse proxy copies the upstream's to it. An
	// upgrade's is written as the upstream's, by itself.
	told := x.w.Header()
	if res.StatusCode == http.StatusSwitchingProtocols {
		told = res.Header
	}
	delete(res.Header, headerRequestID)
	told[headerRequestID] = []string{x.id}
	setDecision(told, x.d)
	x.llm.tell(told)
	x.body.answered(res.Header)

	if res.StatusCode == http.StatusSwitchingProtocols {
		x.upgraded = true
		x.w.status = res.StatusCode // the answer bypasses the recorder
		return nil
	}
	if len(res.Trailer) > 0 && res.Request.Method != http.MethodHead {
		res.Header.Del("Content-Length") // HTTP/1.1 has trailers only without it
		res.ContentLength = -1
	}
	if n := res.ContentLength; n >= 0 && n <= bufferSize {
		// It most likely comes at once: head and body then leave in one write.
		x.proxy.FlushInterval = smallFlush
	}
	asTyped(told, res.Header)
	x.answer = &responseBody{ReadCloser: res.Body, res: res, record: x.record}
	res.Body = x.answer
	x.llm.watch(res, x.answer)
	return nil
}

// fail answers for an upstream that did not.
func (x *exchange) fail(w http.ResponseWriter, _ *http.Request, err error) {
	var p problem
	switch cause := context.Cause(x.ctx); {
	case x.body.tooLarge():
		x.failure = events.OutcomeAborted
		p = plainProblem(http.StatusRequestEntityTooLarge, "the body is larger than the route takes")
	case errors.Is(cause, errBodyStalled):
		x.failure = events.OutcomeAborted
		p = plainProblem(http.StatusRequestTimeout, "the body did not come in time")
	case x.client.Err() != nil:
		x.failure = events.OutcomeAborted
		x.w.WriteHeader(statusClientGone)
		return
	case x.body.broken():
		x.failure = events.OutcomeAborted
		p = plainProblem(http.StatusBadRequest, "the body could not be read to its end")
	case errors.Is(cause, errDrained):
		x.failure = events.OutcomeAborted
		p = plainProblem(http.StatusServiceUnavailable, errDrained.Error())
	case errors.Is(cause, errUpstreamTimeout):
		x.failure = events.OutcomeTimeout
		p = plainProblem(http.StatusGatewayTimeout, "the upstream did not answer in time")
	case !x.reached.Load():
		p = plainProblem(http.StatusBadGateway, "the upstream can't be reached")
	default:
		x.failure = events.OutcomeReset
		p = plainProblem(http.StatusBadGateway, "the upstream broke off")
	}
	if !x.reached.Load() && x.failure != events.OutcomeAborted {
		x.failure = events.OutcomeUnreached // by a dial timeout too
	}
	x.h.log.Debug().Err(err).Str("request", x.id).Str("upstream", x.d.Route.Upstream).Str("outcome", string(x.failure)).Msg("no answer from the upstream")
	p.on(x.d.Route)
	setDecision(w.Header(), x.d)
	x.llm.tell(w.Header())
	x.body.answered(w.Header())
	writeProblem(w, x.id, p)
}

// finish reports the request, once it is over, and how it ended.
func (x *exchange) finish() events.Outcome {
	outcome := x.outcome()
	x.record.End(outcome == events.OutcomeOK)
	x.h.metrics.outcomes.WithLabelValues(x.d.Route.Upstream, string(outcome)).Inc()
	duration := cmp.Or(x.duration, time.Since(x.start))
	if x.status == 0 {
		x.latency = duration
	}
	x.h.engine.Finish(*x.d, admission.Facts{
		ID:          x.id,
		ComputeCost: x.cost,
		Status:      x.status,
		Latency:     x.latency,
		Duration:    duration,
		Outcome:     outcome,
		Unanswered:  x.failure != "",
	})
	return outcome
}

func (x *exchange) outcome() events.Outcome {
	switch {
	case x.failure != "":
		return x.failure
	case x.upgraded:
		return events.OutcomeOK // whoever closes it, it was served
	case x.answer == nil:
		return events.OutcomeAborted // a panic before any answer
	case x.answer.whole:
		return events.OutcomeOK
	case x.answer.err == nil || x.client.Err() != nil || errors.Is(context.Cause(x.ctx), errDrained):
		return events.OutcomeAborted // what stopped was the writing to the client
	default:
		return events.OutcomeReset
	}
}

// requestBody watches how a client's body ends. While it waits for the client, the
// upstream's time does not run, but the client's does, until an answer begins. From then on the
// two may stream as they like.
type requestBody struct {
	io.ReadCloser
	wait, client *patience
	begun        time.Time
	received     int64

	err   atomic.Pointer[error] // why it ended early
	whole atomic.Bool
	// lastly says that a connection ends with a body that is not read: in HTTP/1.
	lastly bool

	// theirs is the client's trailer, which net/http fills in at the end of the body; sent is the
	// upstream's, which the transport reads after that.
	theirs, sent http.Header
}

// announce gives the trailer that the upstream will get, without values yet. What the client has
// not announced is not sent on: it can't be told beforehand, nor what it may replace.
func (b *requestBody) announce(theirs http.Header) (sent http.Header) {
	for name := range theirs {
		if !isToken(name) || isOurs(name) || forwarding(name) || name == admission.KeyHeader || name == headerRequestID {
			continue
		}
		if b.sent == nil {
			b.theirs, b.sent = theirs, make(http.Header)
		}
		b.sent[name] = nil
	}
	return b.sent
}

func (b *requestBody) Read(p []byte) (int, error) {
	b.wait.pause()
	b.client.run(b.allowed())
	n, err := b.ReadCloser.Read(p)
	b.client.pause()
	b.wait.resume()
	b.received += int64(n)
	switch err {
	case nil:
	case io.EOF:
		b.whole.Store(true)
		for name := range b.sent {
			b.sent[name] = b.theirs[name]
		}
	default:
		b.err.CompareAndSwap(nil, &err)
	}
	return n, err
}

// allowed is how long the client may take for what is read next: as long as for any part, and
// no longer than a body that comes too slowly has left.
func (b *requestBody) allowed() time.Duration {
	now := time.Now()
	if b.begun.IsZero() {
		b.begun = now
	}
	slowest := b.client.limit + time.Duration(b.received)*time.Second/minBodyRate
	return min(b.client.limit, slowest-now.Sub(b.begun))
}

// over says that the client is waited for no more.
func (b *requestBody) over() {
	if b != nil {
		b.client.end()
	}
}

// answered notes that the answer, of header h, begins. Where the body is not read to its end by
// then, the connection takes no other request: what is left of the body must not be read as one.
func (b *requestBody) answered(h http.Header) {
	b.over()
	if b != nil && b.lastly && !b.whole.Load() {
		h.Set("Connection", "close")
	}
}

// end leaves nobody reading the body, once the answer is whole. The server would do so after the
// handler, and wait for a client that has stalled for as long as it stays.
func (b *requestBody) end(w http.ResponseWriter) {
	if b == nil || b.whole.Load() {
		return
	}
	c := http.NewResponseController(w)
	_ = c.Flush()
	if !b.failed(os.ErrDeadlineExceeded) { // has had its time already
		_ = c.SetReadDeadline(time.Now().Add(unreadBody))
	}
	b.Close()
}

// failed says whether the body ended early for this reason.
func (b *requestBody) failed(why error) bool { return b.broken() && errors.Is(*b.err.Load(), why) }

func (b *requestBody) broken() bool { return b != nil && b.err.Load() != nil }

func (b *requestBody) tooLarge() bool {
	var limit *http.MaxBytesError
	return b.broken() && errors.As(*b.err.Load(), &limit)
}

// responseBody watches how an upstream's body ends, and keeps its trailers clean.
type responseBody struct {
	io.ReadCloser
	res    *http.Response
	record *cache.Recording
	meter  *llm.Meter
	whole  bool
	err    error
}

func (b *responseBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.record.Write(p[:n])
	b.meter.Write(p[:n])
	switch err {
	case nil:
	case io.EOF:
		b.whole = true
		stripOurs(b.res.Trailer)
	default:
		b.err = err
	}
	return n, err
}

// patience is the time that an upstream or a client is given. It runs while that one is
// what is waited for.
type patience struct {
	mu    sync.Mutex
	limit time.Duration
	timer *time.Timer
	ended bool
}

// newPatience begins the time; over is called when it has run out.
func newPatience(limit time.Duration, over func()) *patience {
	return &patience{limit: limit, timer: time.AfterFunc(limit, over)}
}

func (p *patience) pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timer.Stop()
}

func (p *patience) resume() { p.run(p.limit) }

// run gives this much time from now on.
func (p *patience) run(limit time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended {
		p.timer.Reset(limit)
	}
}

func (p *patience) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.timer.Stop()
}

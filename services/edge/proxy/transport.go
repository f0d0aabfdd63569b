package proxy

import (
	"net"
	"net/http"
	"net/http/httputil"
	"sync"
	"time"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

// maxIdle bounds the connections to an upstream that are kept for later.
const maxIdle = 512

// transports has the client of each upstream, made anew when its connection rules change, and
// forgotten when the policy has the upstream no more.
type transports struct {
	mu         sync.RWMutex
	table      *policy.Table // that byUpstream was last compared with
	byUpstream map[string]upstreamTransport
}

type upstreamTransport struct {
	rules policy.ConnectionRules
	*http.Transport
}

// of gives the client of an upstream; table is the one in force. Requests under way keep the one they began with.
func (t *transports) of(table *policy.Table, upstream string, rules policy.ConnectionRules) *http.Transport {
	t.mu.RLock()
	have, ok := t.byUpstream[upstream]
	current := t.table == table
	t.mu.RUnlock()
	if ok && current && have.rules == rules {
		return have.Transport
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.table != table {
		t.table = table
		t.forget(table.Upstreams())
	}
	if have, ok = t.byUpstream[upstream]; ok && have.rules == rules {
		return have.Transport
	}
	if ok {
		have.CloseIdleConnections()
	}
	if t.byUpstream == nil {
		t.byUpstream = make(map[string]upstreamTransport)
	}
	made := newTransport(rules)
	t.byUpstream[upstream] = upstreamTransport{rules, made}
	return made
}

// forget drops the clients of all upstreams but these. Their connections close, those in use when they are idle.
func (t *transports) forget(but map[string]policy.UpstreamRules) {
	for upstream, have := range t.byUpstream {
		if _, ok := but[upstream]; !ok {
			have.CloseIdleConnections()
			delete(t.byUpstream, upstream)
		}
	}
}

func (t *transports) closeIdle() {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, one := range t.byUpstream {
		one.CloseIdleConnections()
	}
}

// newTransport is a client of one upstream. The wait for a response head is bounded by
// each exchange, which does not count the time that the client takes for its body.
//
// It sends a request again by itself where a connection that was kept turns out to be
// closed: if nothing had been sent, or if the request is idempotent, has no body, and no
// byte was answered. That is one exchange, charged once.
func newTransport(rules policy.ConnectionRules) *http.Transport {
	dialer := &net.Dialer{Timeout: rules.ConnectTimeout, KeepAlive: 30 * time.Second}
	t := &http.Transport{
		DialContext:            dialer.DialContext,
		ForceAttemptHTTP2:      true,
		DisableCompression:     true, // what the client accepts is between it and the upstream
		MaxConnsPerHost:        rules.Max,
		MaxIdleConnsPerHost:    min(maxIdle, rules.Max),
		IdleConnTimeout:        rules.IdleTimeout,
		TLSHandshakeTimeout:    rules.ConnectTimeout,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: 64 << 10,
	}
	if rules.HTTP2 {
		t.Protocols = new(http.Protocols)
		t.Protocols.SetHTTP2(true)
		t.Protocols.SetUnencryptedHTTP2(true)
	}
	return t
}

// buffers lends out copy buffers to the reverse proxy.
type buffers struct{ pool sync.Pool }

const (
	bufferSize = 32 << 10
	// smallBuffer is for answers that come in small pieces, and for many at once.
	smallBuffer = 4 << 10
)

// bufferPool lends buffers for one exchange: small ones to calls of LLM APIs, whose streams stay open for long.
func (h *Handler) bufferPool(call *llmCall) httputil.BufferPool {
	if call != nil {
		return &h.small
	}
	return &h.buffers
}

type smallBuffers struct{ pool sync.Pool }

func (b *smallBuffers) Get() []byte {
	if buf, ok := b.pool.Get().(*[smallBuffer]byte); ok {
		return buf[:]
	}
	return make([]byte, smallBuffer)
}

func (b *smallBuffers) Put(buf []byte) { b.pool.Put((*[smallBuffer]byte)(buf)) }

func (b *buffers) Get() []byte {
	if buf, ok := b.pool.Get().(*[bufferSize]byte); ok {
		return buf[:]
	}
	return make([]byte, bufferSize)
}

func (b *buffers) Put(buf []byte) { b.pool.Put((*[bufferSize]byte)(buf)) }

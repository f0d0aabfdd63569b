package proxy

import (
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/aegisrate/aegisrate/services/edge/admission"
	"github.com/aegisrate/aegisrate/services/edge/cache"
)

// selects is what stored answers are told apart by.
func selects(r *http.Request, d *admission.Decision) cache.Request {
	s := cache.Request{
		Method: r.Method, Host: r.Host, URI: resourceURI(r.URL),
		Upstream: d.Route.Upstream + " " + d.Upstream.URLs[0].String(),
		Header:   r.Header,
	}
	if d.Client.Known {
		s.Client = d.Client.ID
	}
	return s
}

// resourceURI is path and query of a request's target, as they came.
func resourceURI(u *url.URL) string {
	uri := u.EscapedPath()
	if u.RawQuery != "" || u.ForceQuery {
		uri += "?" + u.RawQuery
	}
	return uri
}

// answerStored gives the client a stored answer, if there is one for it.
func (h *Handler) answerStored(w *recorder, r *http.Request, d *admission.Decision) bool {
	a, age, ok := h.cache.Get(selects(r, d), d.Route.MaxStale)
	if !ok {
		return false
	}
	header := w.Header()
	maps.Copy(header, a.Header.Clone())
	asTyped(header, a.Header)
	setDecision(header, d)
	header.Del(headerRetryAfter) // it has its answer
	header.Set(headerDegradation, "Served-From-Stale-Cache")
	header.Set("Age", strconv.FormatInt(int64(age.Seconds()), 10))
	header.Set(headerRequestID, w.id)
	w.WriteHeader(a.Status)
	if r.Method != http.MethodHead {
		w.Write(a.Body) // a client that is gone needs no answer
	}
	return true
}

// invalidate forgets what an unsafe request has changed, by the header of its answer (RFC 9111, 4.4).
func (x *exchange) invalidate(answer http.Header) {
	switch x.in.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return
	}
	host, cache := x.in.Host, x.h.cache
	cache.Invalidate(host, resourceURI(x.in.URL))
	for _, name := range [...]string{"Location", "Content-Location"} {
		if answer.Get(name) == "" {
			continue
		}
		to, err := x.in.URL.Parse(answer.Get(name))
		if err == nil && (to.Host == "" || strings.EqualFold(to.Host, host)) {
			cache.Invalidate(host, resourceURI(to))
		}
	}
}

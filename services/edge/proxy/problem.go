package proxy

import (
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// Problem types. The first two are registered by draft-ietf-httpapi-ratelimit-headers.
const (
	typeQuotaExceeded   = "https://iana.org/assignments/http-problem-types#quota-exceeded"
	typeReducedCapacity = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
	typeCostExceeds     = "urn:aegisrate:problem:cost-exceeds-capacity"
	typeBlocked         = "urn:aegisrate:problem:client-blocked"
	typeBlank           = "about:blank"
)

// problem is an RFC 9457 problem document.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`

	// Violated is the draft's member for Limit.
	Violated   []string `json:"violated-policies,omitempty"`
	Limit      string   `json:"limit,omitempty"`
	Route      string   `json:"route,omitempty"`
	Tier       string   `json:"tier,omitempty"`
	RetryAfter int64    `json:"retry_after,omitempty"`
	RequestID  string   `json:"request_id,omitempty"`

	// Error is the same for clients of LLM routes.
	Error *apiError `json:"error,omitempty"`
}

// on says which route the problem is of.
func (p *problem) on(r *policy.Rules) {
	if r == nil {
		return
	}
	p.Route = r.Name
	if r.LLM != nil {
		p.Error = p.apiError()
	}
}

// plainProblem is a problem that its status says all about, but for detail.
func plainProblem(status int, detail string) problem {
	return problem{Type: typeBlank, Title: http.StatusText(status), Status: status, Detail: detail}
}

// limitProblem is a refusal by a limit.
func limitProblem(kind, title, detail string, d *admission.Decision) problem {
	return problem{
		Type: kind, Title: title, Status: http.StatusTooManyRequests, Detail: detail,
		Violated: []string{d.LimitName}, Limit: d.LimitName, Tier: d.Tier.String(), RetryAfter: d.RetryAfter,
	}
}

// refusal is the problem that a decision not to forward is answered with.
func refusal(d *admission.Decision) problem {
	var p problem
	switch d.Action {
	case admission.Deny:
		p = limitProblem(typeQuotaExceeded, "Quota exceeded",
			limitDetail(d), d)
	case admission.DenyCost:
		p = limitProblem(typeCostExceeds, "Cost exceeds capacity",
			fmt.Sprintf("a request costs more than the %d tokens that limit %s ever holds; waiting does not help", d.Limit, d.LimitName), d)
	case admission.DenyReduced:
		p = limitProblem(typeReducedCapacity, "Temporarily reduced capacity",
			fmt.Sprintf("limit %s is lowered to %d tokens while its upstream is unwell, and a request costs more; retry after %d s", d.LimitName, d.Limit, d.RetryAfter), d)
	case admission.Forbid:
		p = plainProblem(http.StatusForbidden, "the route is closed")
	case admission.Block:
		p = plainProblem(http.StatusForbidden, "this client is blocked; ask whoever runs this API")
		p.Type, p.Title = typeBlocked, "Client blocked"
	case admission.TooLarge:
		p = plainProblem(http.StatusRequestEntityTooLarge, fmt.Sprintf("the body may have at most %d bytes", d.Route.MaxBodyBytes))
	case admission.NoRoute:
		p = plainProblem(http.StatusNotFound, "no route matches")
	case admission.StoreAway:
		p = plainProblem(http.StatusServiceUnavailable, "the limits can't be checked now")
		p.RetryAfter = d.RetryAfter
	default:
		p = plainProblem(http.StatusServiceUnavailable, "no policy is in force yet")
		p.RetryAfter = 1
	}
	p.on(d.Route)
	return p
}

func writeProblem(w http.ResponseWriter, id string, p problem) {
	p.RequestID = id
	writeJSON(w, id, "application/problem+json", p.Status, p)
}

func writeJSON(w http.ResponseWriter, id, contentType string, status int, body any) {
	doc, err := json.Marshal(body)
	if err != nil { // plain strings and numbers always encode
		doc = nil
	}
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Cache-Control", "no-store")
	h.Set(headerRequestID, id)
	w.WriteHeader(status)
	w.Write(append(doc, '\n')) // a client that is gone needs no answer
}

package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge/admission"
	"github.com/aegisrate/aegisrate/services/edge/llm"
)

// headerProfile is how clients of LLM routes choose a profile.
const headerProfile = "Config-Profile"

// Headers in which clients of LLM APIs look for their limits, in the canonical form of net/http.
const (
	headerLimitRequests     = "X-Ratelimit-Limit-Requests"
	headerRemainingRequests = "X-Ratelimit-Remaining-Requests"
	headerResetRequests     = "X-Ratelimit-Reset-Requests"
	headerLimitTokens       = "X-Ratelimit-Limit-Tokens"
	headerRemainingTokens   = "X-Ratelimit-Remaining-Tokens"
	headerResetTokens       = "X-Ratelimit-Reset-Tokens"
)

// llmCall is a request on an LLM route. A nil one is on another.
type llmCall struct {
	call  llm.Call
	grant llm.Grant
	// held says that the grant holds something, which must be settled.
	held bool
	// added says that usage was asked for by the edge, in so many bytes more.
	added    bool
	more     int64
	strategy policy.RoutingStrategy
	meter    *llm.Meter
}

// admitLLM holds an admitted request to the quotas of its LLM route. Where it may not go on, d
// says so, or the problem that is returned does. r's body has been read in part, and is whole again.
func (h *Handler) admitLLM(w *recorder, r *http.Request, d *admission.Decision) (*llmCall, *problem) {
	c := &llmCall{}
	var profile policy.Profile
	if name := r.Header.Get(headerProfile); name != "" {
		var ok bool
		if profile, ok = d.Profile(name); !ok {
			h.engine.Finish(*d, admission.Facts{ID: w.id, Outcome: events.OutcomeRefused})
			return nil, badCall(d, http.StatusBadRequest, "the header config-profile names no profile of the policy")
		}
		c.strategy = profile.RoutingStrategy
	}
	if r.Method != http.MethodPost {
		return c, nil // no call: the list of models, for instance
	}
	rules := d.Route.LLM
	conn := http.NewResponseController(w)
	head, whole, err := readHead(patientReader{r.Body, conn, h.body}, rules.InspectBytes)
	_ = conn.SetReadDeadline(time.Time{})
	if err != nil {
		h.engine.Finish(*d, admission.Facts{ID: w.id, Outcome: events.OutcomeAborted})
		w.Header().Set("Connection", "close")
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, badCall(d, http.StatusRequestTimeout, "the body did not come in time")
		}
		return nil, badCall(d, http.StatusBadRequest, "the body could not be read to its end")
	}
	c.call = llm.Inspect(head, whole, r.Header.Get("Content-Encoding"), r.ContentLength, rules.InspectBytes)

	rpm, tpm := d.LLMQuota()
	q := llm.Quota{User: userOf(d.Client), RPM: rpm, TPM: tpm, Model: c.call.Model, Tokens: c.call.Reserve(rules, tpm)}
	if !d.Exempt {
		q.RPS = profile.Rate(c.call.Model)
	}
	if q.RPM > 0 || q.TPM > 0 || q.RPS > 0 {
		c.grant = h.llm.Reserve(r.Context(), q)
		d.Degraded = d.Degraded || c.grant.Degraded
		switch refused := c.grant.Refused; {
		case c.grant.Degraded && d.Route.Fallback == policy.FallbackClosed:
			if refused.Name == "" {
				_ = c.grant.Refund(r.Context()) // the edge's own counters do not fail
			}
			h.engine.Finish(*d, admission.Facts{ID: w.id, Outcome: events.OutcomeRefused})
			w.Header().Set(headerRetryAfter, "1")
			return nil, badCall(d, http.StatusServiceUnavailable, "the limits can't be asked")
		case c.grant.Degraded && d.Route.Fallback == policy.FallbackOpen && refused.Name != "":
			// It passes, and holds nothing.
		case refused.Name == "":
			c.held = true
		case d.Route.Shadow:
			d.ShadowExceeded = true
			h.metrics.llmRefused.WithLabelValues(d.Route.Name, refused.Name).Inc()
		default:
			h.metrics.llmRefused.WithLabelValues(d.Route.Name, refused.Name).Inc()
			h.engine.Refuse(d, w.id, refusalOf(c.grant))
			return c, nil
		}
		h.metrics.llmTokens.WithLabelValues(d.Route.Name, "reserved").Add(float64(c.reserved()))
	}
	if c.reserved() > 0 && *rules.AddUsage {
		before := len(head)
		head, c.added = c.call.AddUsage(head)
		c.more = int64(len(head) - before)
	}
	if r.ContentLength > 0 {
		r.ContentLength += c.more
	}
	rest := io.Reader(r.Body)
	if whole {
		rest = nil
	}
	r.Body = &rejoined{head, rest, r.Body}
	return c, nil
}

// routing is the strategy that the call's profile names.
func (c *llmCall) routing() policy.RoutingStrategy {
	if c == nil {
		return ""
	}
	return c.strategy
}

// longer is how many bytes more the body has than the client's.
func (c *llmCall) longer() int64 {
	if c == nil {
		return 0
	}
	return c.more
}

// reserved is how many tokens the call holds.
func (c *llmCall) reserved() int64 {
	if c == nil || !c.held {
		return 0
	}
	return c.grant.Reserved()
}

// rejoined is a body of which the beginning has been read. rest is nil where that is all of it: its end is told
// with its last bytes, since a body that is not known to be read ends its connection.
type rejoined struct {
	head []byte
	rest io.Reader
	io.Closer
}

func (b *rejoined) Read(p []byte) (int, error) {
	if len(b.head) == 0 && b.rest != nil {
		return b.rest.Read(p)
	}
	n := copy(p, b.head)
	b.head = b.head[n:]
	if len(b.head) == 0 && b.rest == nil {
		return n, io.EOF
	}
	return n, nil
}

// patientReader waits so long for each part of a body.
type patientReader struct {
	io.Reader
	conn *http.ResponseController
	wait time.Duration
}

func (r patientReader) Read(p []byte) (int, error) {
	_ = r.conn.SetReadDeadline(time.Now().Add(r.wait)) // where none can be set, the server bounds it
	return r.Reader.Read(p)
}

// badCall refuses a call that can't be looked into.
func badCall(d *admission.Decision, status int, detail string) *problem {
	p := plainProblem(status, detail)
	p.on(d.Route)
	return &p
}

// readHead reads at most limit bytes of a body. A larger buffer is taken only as they come.
func readHead(body io.Reader, limit int64) (head []byte, whole bool, err error) {
	var b bytes.Buffer
	n, err := b.ReadFrom(io.LimitReader(body, limit))
	if err != nil || n < limit {
		return b.Bytes(), err == nil, err
	}
	return b.Bytes(), false, nil
}

// userOf names the client in the counters' keys. A user's name has no colon, so it is no other client's address.
func userOf(c admission.Client) string {
	if c.Known {
		return c.User.Name
	}
	return c.ID
}

func refusalOf(g llm.Grant) admission.Refusal {
	v := g.Refused
	window := int64(llm.UserWindow / time.Second)
	if v.Name == llm.RPS {
		window = int64(llm.ModelWindow / time.Second)
	}
	return admission.Refusal{
		LimitView:  admission.LimitView{Name: v.Name, Quota: v.Quota, Window: window, Remaining: v.Remaining, Next: llm.Seconds(g.RetryAfter)},
		Reset:      llm.Seconds(v.Reset),
		RetryAfter: llm.Seconds(g.RetryAfter),
	}
}

// tell sets the headers of the call's limits.
func (c *llmCall) tell(h http.Header) {
	if c == nil {
		return
	}
	for _, t := range []struct {
		v                       llm.View
		limit, remaining, reset string
	}{
		{c.grant.Requests, headerLimitRequests, headerRemainingRequests, headerResetRequests},
		{c.grant.Tokens, headerLimitTokens, headerRemainingTokens, headerResetTokens},
	} {
		if t.v.Name != "" {
			h.Set(t.limit, strconv.FormatInt(t.v.Quota, 10))
			h.Set(t.remaining, strconv.FormatInt(t.v.Remaining, 10))
			h.Set(t.reset, (time.Duration(llm.Seconds(t.v.Reset)) * time.Second).String())
		}
	}
}

// prepare makes the upstream's request one whose answer can be read.
func (c *llmCall) prepare(out http.Header) {
	if c.reserved() > 0 {
		out.Del("Accept-Encoding")
	}
}

// watch reads the usage off an answer while it passes, and takes out what only the edge asked for.
func (c *llmCall) watch(res *http.Response, answer *responseBody) {
	if c.reserved() == 0 || res.StatusCode/100 != 2 || res.Header.Get("Content-Encoding") != "" {
		return
	}
	c.meter = llm.NewMeter(res.Header.Get("Content-Type"))
	answer.meter = c.meter
	if c.added && c.meter.Stream() {
		res.Header.Del("Content-Length")
		res.ContentLength = -1
		res.Body = llm.StripUsage(answer)
	}
}

// How a call was settled.
const (
	byUsage    = "usage"    // what the upstream told
	bySent     = "sent"     // an estimate of what passed of a broken answer
	byEstimate = "estimate" // the reserve, for want of anything better, or what passed if that is more
	byRefund   = "refund"   // nothing was used
)

// used is the tokens that a call has used, and what that rests on.
func (c *llmCall) used(outcome events.Outcome, status int) (int64, string) {
	usage, told, _ := c.meter.Usage()
	switch {
	case outcome == events.OutcomeUnreached, outcome != events.OutcomeAborted && status/100 != 2, status >= 300:
		return 0, byRefund
	case told:
		return usage, byUsage
	case outcome == events.OutcomeOK:
		// A client can keep usage from being told, so a long answer is not left at a short reserve.
		return max(c.grant.Reserved(), c.meter.Sent()), byEstimate
	default:
		// The prompt's estimate alone makes no debt: an image in it is many bytes and few tokens.
		return min(c.call.Prompt, c.grant.Reserved()) + c.meter.Sent(), bySent
	}
}

// settle ends the call's hold on its limits, off the request's path; over is called when it has.
func (x *exchange) settle(outcome events.Outcome, over func()) {
	c := x.llm
	if c == nil || !c.held {
		over()
		return
	}
	go func() {
		defer over()
		m, route := x.h.metrics, x.d.Route.Name
		ctx := context.WithoutCancel(x.client)
		used, by := c.used(outcome, x.status)
		var err error
		if outcome == events.OutcomeUnreached {
			err = c.grant.Refund(ctx)
		} else {
			err = c.grant.Settle(ctx, used)
		}
		if c.grant.Reserved() > 0 {
			m.llmSettled.WithLabelValues(route, by).Inc()
			m.llmTokens.WithLabelValues(route, "used").Add(float64(used))
		}
		if _, _, absurd := c.meter.Usage(); absurd {
			m.llmSettled.WithLabelValues(route, "absurd").Inc()
		}
		if err != nil {
			m.llmSettled.WithLabelValues(route, "lost").Inc()
			x.h.log.Debug().Err(err).Str("request", x.id).Msg("a call's tokens may not have been settled")
		}
	}()
}

// apiError is how OpenAI's API tells of an error, beside the members of the problem document.
type apiError struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    string  `json:"code"`
}

// apiError is p in that shape.
func (p problem) apiError() *apiError {
	e := &apiError{Message: p.Title}
	if p.Detail != "" {
		e.Message = p.Detail
	}
	switch {
	case p.Status == http.StatusTooManyRequests:
		e.Type, e.Code = "requests", "rate_limit_exceeded"
		if p.Limit == llm.TPM {
			e.Type = "tokens"
		}
	case p.Status >= 500:
		e.Type, e.Code = "server_error", strconv.Itoa(p.Status)
	default:
		e.Type, e.Code = "invalid_request_error", strconv.Itoa(p.Status)
	}
	return e
}

// limitDetail says of a limit on calls what it is a limit of.
func limitDetail(d *admission.Decision) string {
	unit := map[string]string{llm.RPM: "calls a minute", llm.TPM: "tokens a minute", llm.RPS: "calls a second of this model"}[d.LimitName]
	if unit == "" {
		unit = "tokens"
	}
	return fmt.Sprintf("limit %s of %d %s is used up; retry after %d s", d.LimitName, d.Limit, unit, d.RetryAfter)
}

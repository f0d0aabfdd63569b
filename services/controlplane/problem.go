package controlplane

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore"
)

// problem is a refusal, as RFC 9457 has it. It is the body over HTTP and NATS alike.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
	// Errors names the fields of a document that was refused.
	Errors policy.Errors `json:"errors,omitempty"`
	// Version is the config version in force, where the request expected another.
	Version uint64 `json:"version,omitempty"`
	// RetryAfter is in seconds; 0: trying again does not help.
	RetryAfter int64 `json:"retry_after,omitempty"`
}

// Error makes a refusal an error, for what takes a function that returns one.
func (p *problem) Error() string { return p.Detail }

func refuse(status int, detail string, args ...any) *problem {
	return &problem{Type: "about:blank", Title: http.StatusText(status), Status: status, Detail: fmt.Sprintf(detail, args...)}
}

// after says when to try again, rounded up.
func (p *problem) after(d time.Duration) *problem {
	p.RetryAfter = max(1, int64((d+time.Second-1)/time.Second))
	return p
}

// result is the problem's kind as events.Audit names them.
func (p *problem) result() string {
	switch p.Status {
	case http.StatusUnauthorized, http.StatusForbidden:
		return "unauthenticated"
	case http.StatusTooManyRequests:
		return "throttled"
	case http.StatusConflict:
		return "conflict"
	default:
		return "refused"
	}
}

// failed is the refusal that an error of the rules stands for.
func failed(err error) *problem {
	var own *problem
	switch {
	case errors.As(err, &own):
		return own
	case errors.Is(err, rulestore.ErrNotFound):
		return refuse(http.StatusNotFound, "there is no such user, address, key or plan")
	case errors.Is(err, rulestore.ErrExists):
		return refuse(http.StatusConflict, "the name, or a key, is taken; nothing was changed")
	case errors.Is(err, rulestore.ErrInUse):
		return refuse(http.StatusConflict, "users have this plan; give them another first")
	default:
		return unavailable("the rules can't be reached; a change may or may not have been made: %v", err)
	}
}

// toJSON writes an answer; answers are made of types that have a JSON form.
func toJSON(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		return []byte(`{"type":"about:blank","title":"Internal Server Error","status":500,"detail":"the answer could not be written"}`)
	}
	return data
}

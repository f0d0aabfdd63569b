package controlplane

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

const (
	// changeTimeout bounds a change from its body to its answer.
	changeTimeout = 8 * time.Second
	// changeTries bounds how often a change is put onto a newer version. Whoever
	// loses a round loses to somebody who succeeded, so many rounds take many writers.
	changeTries = 50

	actionChange = "config.change"
)

// change is one request to change the policy, however it came.
type change struct {
	caller
	// edit makes the next policy of the one in force; its error is policy.Errors or a *problem.
	edit func(policy.Policy) (policy.Policy, error)
	// ifMatch is the If-Match header: the version that the caller saw, "" for any.
	ifMatch string
	// dryRun only tells what would change.
	dryRun bool
}

// patch is the edit of a body as policy.Patch takes it.
func patch(body []byte) func(policy.Policy) (policy.Policy, error) {
	return func(p policy.Policy) (policy.Policy, error) {
		next, _, err := policy.Patch(p, body)
		return next, err
	}
}

// replace is the edit that puts a whole document, in YAML or JSON, in place of the policy in force.
func replace(body []byte) func(policy.Policy) (policy.Policy, error) {
	return func(policy.Policy) (policy.Policy, error) { return policy.Parse(body) }
}

// change applies c to the version in force, whole or not at all. A change by
// somebody else meanwhile is no obstacle, unless c names the version it is meant for.
func (s *Service) change(ctx context.Context, c change) (events.ConfigReply, *problem) {
	reply, refusal := s.apply(ctx, c)
	if refusal == nil && c.dryRun {
		return reply, nil
	}
	a := c.event(actionChange, "")
	if refusal != nil {
		a.Result, a.Detail = refusal.result(), refusal.Detail
	} else if len(reply.Changed) == 0 {
		a.Detail = "nothing to change in version " + strconv.FormatUint(reply.Version, 10)
	} else {
		a.Detail = "version " + strconv.FormatUint(reply.Version, 10) + ": " + strings.Join(reply.Changed, ", ")
	}
	s.metrics.changes.WithLabelValues(c.via, a.Result).Inc()
	s.audit(a)
	return reply, refusal
}

func (s *Service) apply(ctx context.Context, c change) (events.ConfigReply, *problem) {
	expected, refusal := parseIfMatch(c.ifMatch)
	if refusal != nil {
		return events.ConfigReply{}, refusal
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	// One at a time: replicas may still race, callers of this one need not.
	select {
	case s.writing <- struct{}{}:
		defer func() { <-s.writing }()
	case <-ctx.Done():
		return events.ConfigReply{}, unavailable("other changes are waiting for NATS; nothing was changed")
	}
	for range changeTries {
		// The stream is asked each time: what is remembered may be a moment old, and
		// a change that seems to change nothing may undo somebody's.
		cur, at, err := s.versions.latest(ctx)
		switch {
		case err != nil:
			return events.ConfigReply{}, unavailable("NATS can't be asked for the version in force; nothing was changed: %v", err)
		case cur == nil:
			return events.ConfigReply{}, unavailable("there is no config yet to change; give the controlplane a policy file")
		case len(cur.foreign) > 0:
			return events.ConfigReply{}, refuse(http.StatusServiceUnavailable,
				"the config was written by a newer release (it has %s); nothing was changed, upgrade this controlplane", cur.foreign[0])
		case expected != 0 && expected != cur.Version:
			p := refuse(http.StatusConflict, "version %d is in force, not %d; nothing was changed", cur.Version, expected)
			p.Version = cur.Version
			return events.ConfigReply{}, p
		}
		next, err := c.edit(cur.policy)
		if err != nil {
			return events.ConfigReply{}, invalid(err)
		}
		reply := events.ConfigReply{Version: cur.Version, Changed: []string{}, DryRun: c.dryRun}
		if reply.Diff, err = policy.Diff(cur.policy, next); err != nil {
			return events.ConfigReply{}, invalid(err)
		}
		for _, d := range reply.Diff {
			reply.Changed = append(reply.Changed, d.Path)
		}
		if len(reply.Changed) == 0 || c.dryRun {
			return reply, nil
		}
		stored, err := s.versions.append(ctx, at, c.caller, next)
		switch {
		case err == nil:
			reply.Version = stored.Version
			return reply, nil
		case errors.Is(err, bus.ErrConflict):
			if sleep(ctx, rand.N(20*time.Millisecond)) != nil {
				return events.ConfigReply{}, unavailable("NATS is too slow; nothing was changed")
			}
		default:
			return events.ConfigReply{}, notStored(err)
		}
	}
	p := refuse(http.StatusConflict, "others kept changing the config at the same moment; nothing was changed by this request").after(time.Second)
	p.Version = s.versions.current().Version
	return events.ConfigReply{}, p
}

// invalid is the refusal of a document.
func invalid(err error) *problem {
	var own *problem
	if errors.As(err, &own) {
		return own
	}
	var errs policy.Errors
	if !errors.As(err, &errs) {
		return refuse(http.StatusBadRequest, "the change is not valid: %v", err)
	}
	p := refuse(http.StatusBadRequest, "the change is not valid, and nothing of it was applied: %v", errs[0])
	p.Errors = errs
	return p
}

// notStored is the refusal of a valid change that NATS did not take.
func notStored(err error) *problem {
	var errs policy.Errors
	switch {
	case errors.As(err, &errs):
		return invalid(err) // too large, for instance
	case errors.Is(err, bus.ErrUnavailable):
		return unavailable("NATS did not answer in time; the change may or may not have been stored, read the config before trying again: %v", err)
	case errors.Is(err, bus.ErrTooLarge):
		return refuse(http.StatusRequestEntityTooLarge, "the config is larger than NATS takes in one message; nothing was changed: %v", err)
	default:
		return unavailable("NATS refused the version; nothing was changed: %v", err)
	}
}

func unavailable(detail string, args ...any) *problem {
	return refuse(http.StatusServiceUnavailable, detail, args...).after(time.Second)
}

// parseIfMatch reads an If-Match header, "7" in quotes or without; 0 is any version.
func parseIfMatch(h string) (uint64, *problem) {
	h = strings.TrimSpace(h)
	if h == "" || h == "*" {
		return 0, nil
	}
	n, err := strconv.ParseUint(strings.Trim(h, `"`), 10, 64)
	if err != nil || n == 0 {
		return 0, refuse(http.StatusBadRequest, `If-Match must be one config version, such as "7", as the ETag of /api/config has it`)
	}
	return n, nil
}

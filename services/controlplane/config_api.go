package controlplane

import (
	"context"
	_ "embed"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

//go:embed openapi.yaml
var openAPI []byte

func (s *Service) postControl(c *call) (any, *problem) { return s.changed(c, patch(c.body)) }

func (s *Service) putConfig(c *call) (any, *problem) { return s.changed(c, replace(c.body)) }

// changed makes the change that a request asks for.
func (s *Service) changed(c *call, edit func(policy.Policy) (policy.Policy, error)) (any, *problem) {
	reply, refusal := s.change(c.Context(), change{
		caller: c.caller, edit: edit, ifMatch: c.Header.Get("If-Match"), dryRun: c.URL.Query().Get("dry_run") == "true",
	})
	if refusal != nil {
		return nil, refusal
	}
	c.w.Header().Set("ETag", etag(reply.Version))
	return reply, nil
}

func (s *Service) getConfig(c *call) (any, *problem) {
	cur := s.versions.current()
	if cur == nil {
		return nil, unavailable("no config is known yet")
	}
	tag := etag(cur.Version)
	c.w.Header().Set("ETag", tag)
	if c.Header.Get("If-None-Match") == tag {
		c.status = http.StatusNotModified
		return nil, nil
	}
	return cur.ConfigVersion, nil
}

// versionInfo is a version without its document.
type versionInfo struct {
	Version uint64    `json:"version"`
	By      string    `json:"by"`
	Via     string    `json:"via"`
	Time    time.Time `json:"time"`
	Actor   string    `json:"actor,omitempty"`
	Reason  string    `json:"reason,omitempty"`
	// Unreadable versions were never in force.
	Unreadable bool `json:"unreadable,omitempty"`
}

type versionsReply struct {
	Versions []versionInfo `json:"versions"`
	// Next is what "before" must be for the page after; 0: there is none.
	Next uint64 `json:"next,omitempty"`
}

const (
	versionsPage    = 20
	maxVersionsPage = 100
)

// getVersions lists the history, the newest first.
func (s *Service) getVersions(c *call) (any, *problem) {
	limit, refusal := c.number("limit", versionsPage)
	if refusal == nil && (limit < 1 || limit > maxVersionsPage) {
		refusal = refuse(http.StatusBadRequest, "limit must be 1 to %d", maxVersionsPage)
	}
	before, bad := c.number("before", 0)
	if refusal != nil || bad != nil {
		return nil, errorOr(refusal, bad)
	}
	state, err := s.bus.Stream(c.Context(), events.StreamConfig)
	if err != nil {
		return nil, unavailable("NATS can't be asked for the history: %v", err)
	}
	if before == 0 || before > state.Last {
		before = state.Last + 1
	}
	reply := versionsReply{Versions: []versionInfo{}}
	for n := before - 1; n >= max(1, state.First); n-- {
		if uint64(len(reply.Versions)) == limit {
			reply.Next = n + 1
			break
		}
		v, err := s.versions.numbered(c.Context(), n)
		switch {
		case err == nil:
			reply.Versions = append(reply.Versions, versionInfo{v.Version, v.By, v.Via, v.Time, v.Actor, v.Reason, false})
		case errors.Is(err, bus.ErrUnavailable):
			return nil, unavailable("NATS can't be asked for the history: %v", err)
		case !errors.Is(err, bus.ErrNotFound):
			reply.Versions = append(reply.Versions, versionInfo{Version: n, Unreadable: true})
		}
	}
	return reply, nil
}

func errorOr(ps ...*problem) *problem {
	for _, p := range ps {
		if p != nil {
			return p
		}
	}
	return nil
}

// number is a parameter of the query.
func (c *call) number(name string, otherwise uint64) (uint64, *problem) {
	text := c.URL.Query().Get(name)
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil {
		return 0, refuse(http.StatusBadRequest, "%s must be a number", name)
	}
	return n, nil
}

// stored is a version by its number.
func (s *Service) stored(ctx context.Context, number uint64) (*version, *problem) {
	if number == 0 {
		return nil, refuse(http.StatusBadRequest, "versions count from 1")
	}
	v, err := s.versions.numbered(ctx, number)
	switch {
	case err == nil:
		return v, nil
	case errors.Is(err, bus.ErrNotFound):
		return nil, refuse(http.StatusNotFound, "there is no version %d", number)
	case errors.Is(err, bus.ErrUnavailable), errors.Is(err, bus.ErrNoStream):
		return nil, unavailable("NATS can't be asked for version %d: %v", number, err)
	default:
		return nil, refuse(http.StatusUnprocessableEntity, "version %d can't be read: %v", number, err)
	}
}

func (s *Service) getVersion(c *call) (any, *problem) {
	n, err := strconv.ParseUint(c.param("version"), 10, 63)
	if err != nil {
		return nil, refuse(http.StatusBadRequest, "a version is a number")
	}
	v, refusal := s.stored(c.Context(), n)
	if refusal != nil {
		return nil, refusal
	}
	return v.ConfigVersion, nil
}

type diffReply struct {
	From uint64              `json:"from"`
	To   uint64              `json:"to"`
	Diff []policy.Difference `json:"diff"`
}

// getDiff compares two versions: by default the one in force with the one before.
func (s *Service) getDiff(c *call) (any, *problem) {
	cur := s.versions.current()
	if cur == nil {
		return nil, unavailable("no config is known yet")
	}
	to, refusal := c.number("to", cur.Version)
	from, bad := c.number("from", max(1, to-min(to, 1)))
	if refusal != nil || bad != nil {
		return nil, errorOr(refusal, bad)
	}
	a, refusal := s.stored(c.Context(), from)
	if refusal != nil {
		return nil, refusal
	}
	b, refusal := s.stored(c.Context(), to)
	if refusal != nil {
		return nil, refusal
	}
	diff, err := policy.Diff(a.policy, b.policy)
	if err != nil {
		return nil, invalid(err)
	}
	return diffReply{from, to, diff}, nil
}

// postRollback appends what an earlier version says as a new one.
func (s *Service) postRollback(c *call) (any, *problem) {
	var body struct {
		To int64 `json:"to"`
	}
	if refusal := c.decode(&body); refusal != nil {
		return nil, refusal
	}
	if body.To < 1 {
		return nil, refuse(http.StatusBadRequest, "to must be the version to go back to")
	}
	v, refusal := s.stored(c.Context(), uint64(body.To))
	if refusal != nil {
		return nil, refusal
	}
	if len(v.foreign) > 0 {
		return nil, refuse(http.StatusConflict, "version %d was written by a newer release (it has %s)", v.Version, v.foreign[0])
	}
	if c.reason == "" {
		c.reason = "back to version " + strconv.FormatUint(v.Version, 10)
	}
	return s.changed(c, func(policy.Policy) (policy.Policy, error) { return v.policy, nil })
}

func (s *Service) getStatus(*call) (any, *problem) {
	return s.status.now(s.versions.current(), s.bus.Connected()), nil
}

func (s *Service) getOpenAPI(c *call) (any, *problem) {
	c.w.Header().Set("Content-Type", "application/yaml")
	_, _ = c.w.Write(openAPI) // a client that is gone needs no answer
	c.written = true
	return nil, nil
}

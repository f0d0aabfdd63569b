package controlplane

import (
	"context"
	"fmt"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/redisstore"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore"
)

// finding is what a check found.
type finding struct {
	Check string `json:"check"`
	// Level is "ok", "warn" or "fail".
	Level  string `json:"level"`
	Detail string `json:"detail"`
	// Advice says what to do; "" where nothing is to be done.
	Advice string `json:"advice,omitempty"`
}

type doctorReply struct {
	// Time is the controlplane's clock.
	Time     time.Time `json:"time"`
	Findings []finding `json:"findings"`
}

// examination collects findings.
type examination struct{ found []finding }

func (e *examination) ok(check, format string, args ...any) {
	e.found = append(e.found, finding{check, "ok", fmt.Sprintf(format, args...), ""})
}

func (e *examination) bad(level, check, advice, format string, args ...any) {
	e.found = append(e.found, finding{check, level, fmt.Sprintf(format, args...), advice})
}

// nearlyFull is the share of a bound from which on a stream is worth a warning, maxSkew how far clocks may
// be apart.
const (
	nearlyFull = 0.8
	maxSkew    = time.Second
)

// getDoctor looks at everything that the controlplane can reach.
func (s *Service) getDoctor(c *call) (any, *problem) {
	e := new(examination)
	s.examineNATS(c.Context(), e)
	s.examineConfig(e)
	s.examineFleet(e)
	s.examineRedis(c.Context(), e)
	if _, err := s.rules.Users(c.Context(), rulestore.Query{Limit: 1}); err != nil {
		e.bad("fail", "rules", "look at PostgreSQL and AEGIS_RULES_DSN; edges go on with what they know", "%s: %v", s.rules.About(), err)
	} else {
		e.ok("rules", "%s answers", s.rules.About())
	}
	return doctorReply{time.Now().UTC(), e.found}, nil
}

func (s *Service) examineNATS(ctx context.Context, e *examination) {
	if !s.bus.Connected() {
		e.bad("fail", "nats", "start NATS, or look at AEGIS_NATS_URL, AEGIS_NATS_USER and its password", "not connected")
		return
	}
	if n := s.bus.Stats().Denied; n > 0 {
		e.bad("fail", "nats permissions", "compare the controlplane's user with deploy/nats.conf", "%d operations were denied", n)
	} else {
		e.ok("nats permissions", "nothing was denied")
	}
	for _, want := range events.Streams() {
		state, err := s.bus.Stream(ctx, want.Name)
		switch {
		case err != nil:
			e.bad("fail", "stream "+want.Name, "restart the controlplane, which makes missing streams; look at the disk of NATS", "%v", err)
		case want.MaxBytes > 0 && float64(state.Bytes) > nearlyFull*float64(want.MaxBytes):
			level, advice := "warn", "old messages go as it fills"
			if want.RefuseNew {
				advice = "it refuses new messages when it is full: see that what reads it keeps up"
			}
			e.bad(level, "stream "+want.Name, advice, "%d of %d bytes", state.Bytes, want.MaxBytes)
		default:
			e.ok("stream "+want.Name, "%d messages, %d bytes", state.Msgs, state.Bytes)
		}
	}
}

func (s *Service) examineConfig(e *examination) {
	switch cur := s.versions.current(); {
	case cur == nil:
		e.bad("fail", "config", "give the controlplane a policy file, or aegis apply -f FILE", "no version is known")
	case len(cur.foreign) > 0:
		e.bad("warn", "config", "upgrade this controlplane", "version %d was written by a newer release", cur.Version)
	default:
		e.ok("config", "version %d is in force", cur.Version)
	}
}

func (s *Service) examineFleet(e *examination) {
	st := s.status.now(s.versions.current(), s.bus.Connected())
	alive := 0
	for _, edge := range st.Edges {
		check := "edge " + edge.Edge
		switch {
		case !edge.Alive:
			e.bad("warn", check, "if it was not stopped on purpose, look at its log", "not heard for %.0f s", edge.AgeSeconds)
			continue
		case st.Config != nil && edge.Config != st.Config.Version:
			e.bad("warn", check, "wait a moment; if it stays so, look at its log and its NATS user", "it obeys config version %d, %d is in force", edge.Config, st.Config.Version)
		case edge.Degraded:
			e.bad("warn", check, "look at Redis from that edge's machine", "it decides without Redis")
		case edge.Lost > 0:
			e.bad("warn", check, "see that NATS keeps up", "%d events were lost", edge.Lost)
		default:
			e.ok(check, "alive, config version %d", edge.Config)
		}
		alive++
	}
	if alive == 0 {
		e.bad("fail", "edges", "start an edge, or look at its NATS user", "none is alive")
	}
	for _, u := range st.Upstreams {
		switch {
		case u.Stale:
			e.bad("warn", "upstream "+u.Upstream, "start healthwatch; until then edges use a multiplier of 1", "no tick since %s", u.Time.Format(time.RFC3339))
		case u.Multiplier < 1:
			e.bad("warn", "upstream "+u.Upstream, "look at the upstream: its limits are lowered", "multiplier %.2f, p95 %.0f ms, errors %.1f %%", u.Multiplier, u.P95Ms, 100*u.ErrorRate)
		default:
			e.ok("upstream "+u.Upstream, "multiplier 1")
		}
	}
}

// inspector is a store that can tell of its server.
type inspector interface {
	Inspect(ctx context.Context) (redisstore.Server, error)
}

func (s *Service) examineRedis(ctx context.Context, e *examination) {
	redis, ok := s.store.(inspector)
	if !ok {
		e.bad("warn", "redis", "give the controlplane AEGIS_REDIS_ADDR", "this controlplane has no Redis")
		return
	}
	server, err := redis.Inspect(ctx)
	if err != nil {
		e.bad("fail", "redis", "start Redis, or look at AEGIS_REDIS_ADDR, its user and its password", "%v", err)
		return
	}
	if server.MaxMemory > 0 && server.Policy != "volatile-ttl" && server.Policy != "noeviction" {
		e.bad("fail", "redis policy", "set maxmemory-policy volatile-ttl: it evicts what is nearest to full", "%s may evict debtors", server.Policy)
	} else {
		e.ok("redis policy", "%s, %d of %d bytes", server.Policy, server.UsedMemory, server.MaxMemory)
	}
	if skew := time.Until(server.Time).Abs(); skew > maxSkew {
		e.bad("warn", "redis clock", "run NTP on both machines; limits count on Redis' clock alone", "%v from the controlplane's", skew.Round(time.Millisecond))
	} else {
		e.ok("redis clock", "%v from the controlplane's", skew.Round(time.Millisecond))
	}
}

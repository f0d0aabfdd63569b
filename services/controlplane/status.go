package controlplane

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

const (
	// edgeLife is how long an edge counts as alive after a heartbeat, edgeMemory
	// how long it is shown.
	edgeLife   = 3 * time.Second
	edgeMemory = time.Minute
	// tickLife is how long a multiplier holds after its tick; edges use 1 from then on.
	tickLife = 15 * time.Second
	// maxSeen bounds edges and upstreams, whatever is published.
	maxSeen = 10_000
)

// status is what the system's services last said.
type status struct {
	bus *bus.Bus
	log zerolog.Logger

	mu        sync.Mutex
	edges     map[string]heard[events.Heartbeat]
	upstreams map[string]heard[events.Health]
}

type heard[T any] struct {
	said T
	at   time.Time
}

func newStatus(b *bus.Bus, log zerolog.Logger) *status {
	return &status{bus: b, log: log, edges: make(map[string]heard[events.Heartbeat]), upstreams: make(map[string]heard[events.Health])}
}

// followEdges listens for heartbeats until ctx ends.
func (s *status) followEdges(ctx context.Context) error {
	sub, err := s.bus.Subscribe(events.AllHeartbeats, func(m bus.Message) {
		if beat, err := events.Decode[events.Heartbeat](m.Data); err == nil {
			s.beat(beat, time.Now())
		}
	})
	if err != nil {
		return err
	}
	<-ctx.Done()
	sub.Stop()
	return nil
}

func (s *status) beat(beat events.Heartbeat, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if beat.Leaving {
		delete(s.edges, beat.Edge)
		return
	}
	if _, known := s.edges[beat.Edge]; !known && len(s.edges) >= maxSeen {
		return
	}
	s.edges[beat.Edge] = heard[events.Heartbeat]{beat, now}
}

// followHealth reads the ticks of every upstream until ctx ends.
func (s *status) followHealth(ctx context.Context) error {
	for ctx.Err() == nil {
		err := s.bus.Follow(ctx, events.StreamHealth, bus.LastPerSubject(), func(m bus.Message) error {
			if tick, err := events.Decode[events.Health](m.Data); err == nil {
				s.tick(tick, m.Time)
			}
			return nil
		})
		if errors.Is(err, bus.ErrStreamReset) {
			s.log.Warn().Err(err).Msg("the health stream was reset")
		}
		if sleep(ctx, upkeepRetry) != nil {
			break
		}
	}
	return nil
}

func (s *status) tick(tick events.Health, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.upstreams[tick.Upstream]; !known && len(s.upstreams) >= maxSeen {
		return
	}
	s.upstreams[tick.Upstream] = heard[events.Health]{tick, at}
}

// multiplier is what edges multiply the quotas of the routes to an upstream by, in millionths.
func (s *status) multiplier(upstream string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, known := s.upstreams[upstream]
	if !known || time.Since(h.at) > tickLife {
		return bucket.One
	}
	return h.said.Multiplier
}

// statusReply is the answer of GET /api/status.
type statusReply struct {
	// Connected tells whether NATS is there; without it everything below is what was heard last.
	Connected bool             `json:"connected"`
	Config    *configStatus    `json:"config"`
	Upstreams []upstreamStatus `json:"upstreams"`
	Edges     []edgeStatus     `json:"edges"`
}

type configStatus struct {
	Version uint64    `json:"version"`
	By      string    `json:"by"`
	Via     string    `json:"via"`
	Time    time.Time `json:"time"`
}

type upstreamStatus struct {
	Upstream string `json:"upstream"`
	// Multiplier is M as the last tick had it, 0 to 1; Stale says that edges no longer obey it.
	Multiplier float64   `json:"multiplier"`
	Stale      bool      `json:"stale"`
	P95Ms      float64   `json:"p95_ms"`
	ErrorRate  float64   `json:"error_rate"`
	Samples    int       `json:"samples"`
	Tick       uint64    `json:"tick"`
	Time       time.Time `json:"time"`
}

type edgeStatus struct {
	events.Heartbeat
	Alive      bool    `json:"alive"`
	AgeSeconds float64 `json:"age_seconds"`
}

func (s *status) now(cur *version, connected bool) statusReply {
	reply := statusReply{Connected: connected, Upstreams: []upstreamStatus{}, Edges: []edgeStatus{}}
	if cur != nil {
		reply.Config = &configStatus{cur.Version, cur.By, cur.Via, cur.Time}
	}
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, h := range s.upstreams {
		if cur != nil {
			if _, used := cur.policy.Upstreams[name]; !used {
				continue
			}
		}
		reply.Upstreams = append(reply.Upstreams, upstreamStatus{
			Upstream: name, Multiplier: float64(h.said.Multiplier) / 1e6, Stale: now.Sub(h.at) > tickLife,
			P95Ms: float64(h.said.P95) / 1e3, ErrorRate: float64(h.said.ErrorRate) / 1e6, Samples: h.said.Samples,
			Tick: h.said.Tick, Time: h.at,
		})
	}
	for name, h := range s.edges {
		age := now.Sub(h.at)
		if age > edgeMemory && connected {
			delete(s.edges, name)
			continue
		}
		reply.Edges = append(reply.Edges, edgeStatus{h.said, age <= edgeLife, age.Round(time.Millisecond).Seconds()})
	}
	slices.SortFunc(reply.Upstreams, func(a, b upstreamStatus) int { return cmp.Compare(a.Upstream, b.Upstream) })
	slices.SortFunc(reply.Edges, func(a, b edgeStatus) int { return cmp.Compare(a.Edge, b.Edge) })
	return reply
}

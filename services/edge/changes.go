package edge

import (
	"context"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// echoEvery is how often an edge makes sure that it hears of changed buckets.
const echoEvery = 250 * time.Millisecond

// hearChanges forgets what is remembered of buckets that others have changed, and says to the engine
// whether it can be sure to hear of them.
func (s *Service) hearChanges(ctx context.Context) error {
	e := echoes{bus: s.bus, subject: events.SubjectEcho(s.boot), engine: s.engine}
	// Echoes and changes come by one subscription, so in the order they were sent.
	sub, err := s.bus.Subscribe(events.AllChanged, func(m bus.Message) {
		if events.IsEcho(m.Subject) {
			if m.Subject == e.subject {
				e.heard(m)
			}
			return
		}
		changed, err := events.Decode[events.BucketsChanged](m.Data)
		if err != nil {
			s.log.Warn().Err(err).Str("subject", m.Subject).Msg("changed buckets refused")
			return
		}
		for _, b := range changed.Buckets {
			s.engine.Changed(b)
		}
	})
	if err != nil {
		return err
	}
	defer sub.Stop()
	tick := time.NewTicker(echoEvery)
	defer tick.Stop()
	for {
		e.send()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// echoes are numbered, so that one that is missed shows.
type echoes struct {
	bus     *bus.Bus
	subject string
	engine  *admission.Engine
	n       uint64

	last  uint64
	stats bus.Stats // when the last was heard
}

func (e *echoes) send() {
	e.n++
	data, err := events.Encode(events.Echo{N: e.n, Sent: e.engine.Clock.Elapsed()})
	if err == nil {
		_ = e.bus.Send(e.subject, data) // one that is not sent is missed
	}
}

func (e *echoes) heard(m bus.Message) {
	echo, err := events.Decode[events.Echo](m.Data)
	if err != nil {
		return // missed
	}
	stats := e.bus.Stats()
	missed := echo.N != e.last+1 || stats.Reconnects != e.stats.Reconnects || stats.Slow != e.stats.Slow
	e.last, e.stats = echo.N, stats
	e.engine.Memory.Echo(echo.Sent, missed)
}

// leases gives back what is leased and not spent, and all of it at the end.
func (s *Service) leases(ctx context.Context) error {
	tick := time.NewTicker(admission.TendInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
			defer cancel()
			s.engine.Release(bound)
			return nil
		case <-tick.C:
			s.engine.Tend(ctx)
		}
	}
}

// returned tells the other edges that a client has tokens again.
func (s *Service) returned(client string) {
	data, err := events.Encode(events.BucketsChanged{Buckets: []events.ChangedBucket{{Client: client, Why: events.ChangedGain}}})
	if err == nil {
		err = s.bus.Send(events.SubjectChanged(store.ShardOf(client)), data)
	}
	if err != nil {
		s.log.Debug().Err(err).Msg("the other edges are not told of a returned lease: they ask again within a second")
	}
}

package edge

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// retryEvery is the pause before a stream is looked for again.
const retryEvery = 200 * time.Millisecond

// policyFeed keeps the engine's table the newest good one: of the config stream,
// of what was kept of it on disk, of the policy file, in this order. It starts from the
// disk at once and lets the stream overtake it, so that NATS is never waited for.
type policyFeed struct {
	engine  *admission.Engine
	dir     string
	file    string
	metrics *metrics
	log     zerolog.Logger

	mu sync.Mutex
	// stream is the incarnation that the version in force counts in; "" for the policy file.
	stream  string
	version uint64
	// key verifies versions of the stream and of the snapshot; nil: none is signed.
	key ed25519.PublicKey
	// base is the policy in force without the rules' plans, which replace its own of their names.
	base  policy.Policy
	plans map[string]policy.Plan
}

// usePlans puts the rules' plans in force.
func (f *policyFeed) usePlans(plans map[string]policy.Plan) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.plans = plans
	if f.engine.Table() == nil {
		return
	}
	if err := f.compile(f.base, f.version); err != nil {
		f.log.Error().Err(err).Msg("the plans of the rules can't be used; those in force stay")
	}
}

// compile puts a policy in force, with the rules' plans.
func (f *policyFeed) compile(p policy.Policy, version uint64) error {
	table, err := policy.Compile(p.WithPlans(f.plans), version)
	if err != nil {
		return err
	}
	f.engine.Use(table)
	f.base = p
	return nil
}

// load puts in force what is on disk. Without anything it leaves the engine without a
// table; a policy file that can't be used is an error, since an operator named it.
func (f *policyFeed) load() error {
	stream, v, err := readSnapshot(f.dir)
	if err == nil {
		err = f.use(stream, v)
	}
	switch {
	case err == nil:
		f.log.Info().Uint64("version", v.Version).Msg("policy taken from the snapshot")
		return nil
	case !errors.Is(err, os.ErrNotExist):
		f.log.Error().Err(err).Msg("the policy snapshot can't be used")
	}
	if f.file == "" {
		return nil
	}
	doc, err := os.ReadFile(f.file)
	if err != nil {
		return fmt.Errorf("policy-file: %w", err)
	}
	p, err := policy.Parse(doc)
	if err != nil {
		return fmt.Errorf("policy-file %s: %w", f.file, err)
	}
	if err := f.compile(p, 0); err != nil {
		return fmt.Errorf("policy-file %s: %w", f.file, err)
	}
	f.log.Info().Str("file", f.file).Msg("policy taken from the policy file")
	return nil
}

// follow takes what comes on the config stream until ctx ends.
func (f *policyFeed) follow(ctx context.Context, b *bus.Bus) {
	followStream(ctx, b, events.StreamConfig, f.log, func(incarnation string) func(bus.Message) {
		return func(m bus.Message) { f.take(incarnation, m) }
	})
}

// take puts a version of the stream in force, or keeps the one that is. Within an
// incarnation of the stream the version never goes back. Another incarnation counts
// anew, and what it says goes: it is what all other edges will hear.
func (f *policyFeed) take(stream string, m bus.Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v, err := events.DecodeConfig(m.Data, m.Seq)
	if err == nil {
		if stream == f.stream && v.Version <= f.version {
			return
		}
		err = f.use(stream, v)
	}
	if err != nil {
		f.metrics.rejected.Inc()
		f.log.Error().Err(err).Uint64("seq", m.Seq).Uint64("in_force", f.version).Msg("policy version refused; the last good one stays")
		return
	}
	f.log.Info().Uint64("version", v.Version).Str("by", v.By).Str("via", v.Via).Msg("policy in force")
	if err := writeSnapshot(f.dir, stream, m.Data); err != nil {
		f.metrics.snapshotErrors.Inc()
		f.log.Error().Err(err).Str("dir", f.dir).Msg("the policy can't be kept on disk; a start without NATS would get an older one")
	}
}

func (f *policyFeed) use(stream string, v events.ConfigVersion) error {
	if err := v.Verify(f.key); err != nil {
		return err
	}
	p, dropped, err := policy.Receive(v.Document)
	if err != nil {
		return err
	}
	if err := f.compile(p, v.Version); err != nil {
		return err
	}
	if len(dropped) > 0 {
		f.metrics.unknownKeys.Add(float64(len(dropped)))
		f.log.Warn().Strs("keys", dropped).Uint64("version", v.Version).Msg("the policy has keys that this edge does not know; they are ignored")
	}
	f.stream, f.version = stream, v.Version
	return nil
}

// healthFeed gives the engine each upstream's multiplier.
type healthFeed struct {
	multipliers *admission.Multipliers
	metrics     *metrics
	log         zerolog.Logger
}

func (f healthFeed) follow(ctx context.Context, b *bus.Bus) {
	followStream(ctx, b, events.StreamHealth, f.log, func(string) func(bus.Message) { return f.begin() })
}

// begin takes the ticks of one reading of the stream. The first of an upstream is whatever
// stands there, perhaps for long: its age counts. The next ones are new by themselves,
// whatever the clocks say.
func (f healthFeed) begin() func(bus.Message) {
	seen := make(map[string]bool)
	return func(m bus.Message) {
		h, err := events.Decode[events.Health](m.Data)
		if err == nil && m.Subject != events.SubjectHealth(h.Upstream) {
			err = fmt.Errorf("it tells of upstream %q", h.Upstream)
		}
		if err != nil {
			f.metrics.badHealth.Inc()
			f.log.Error().Err(err).Str("subject", m.Subject).Uint64("seq", m.Seq).Msg("health tick refused")
			return
		}
		var age time.Duration
		if !seen[h.Upstream] {
			seen[h.Upstream] = true
			age = time.Since(m.Time)
		}
		f.multipliers.Set(h.Upstream, h.Multiplier, age)
	}
}

// followStream hands a stream's last message of each subject, and all that follow, to what
// begin makes for the incarnation of the stream. It returns when ctx ends.
func followStream(ctx context.Context, b *bus.Bus, stream string, log zerolog.Logger, begin func(incarnation string) func(bus.Message), opts ...bus.FollowOption) {
	for ctx.Err() == nil {
		state, err := b.Stream(ctx, stream)
		if err == nil {
			take := begin(state.ID)
			err = b.Follow(ctx, stream, bus.LastPerSubject(), func(m bus.Message) error {
				take(m)
				return nil
			}, append(opts, bus.OfStream(state.ID))...)
		}
		if ctx.Err() != nil {
			return
		}
		log.Debug().Err(err).Str("stream", stream).Msg("the stream can't be followed now")
		select {
		case <-ctx.Done():
		case <-time.After(retryEvery):
		}
	}
}

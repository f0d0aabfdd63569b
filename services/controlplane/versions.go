package controlplane

import (
	"context"
	"crypto/ed25519"
	"errors"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

const (
	// upkeepEvery is how often the streams are looked after, upkeepRetry how often while that fails.
	upkeepEvery = 10 * time.Second
	upkeepRetry = 250 * time.Millisecond
)

// version is one good version of the policy.
type version struct {
	events.ConfigVersion
	policy policy.Policy
	// foreign lists the keys that this release does not know. Versions made from
	// this one would lack them.
	foreign []string
}

// place is where AEGIS_CONFIG ends: its incarnation and last sequence. A version
// is appended at the place that its author saw, or not at all.
type place struct {
	stream string // "": not known
	seq    uint64
}

// versions holds what AEGIS_CONFIG says, and appends to it.
type versions struct {
	bus     *bus.Bus
	log     zerolog.Logger
	metrics *metrics
	initial *policy.Policy     // to begin with; may be nil
	key     ed25519.PrivateKey // signs versions; nil: they are not signed
	amiss   chan struct{}      // holds a token when the stream was found missing, or ending in no version

	mu  sync.RWMutex
	cur *version // the last good one; nil before the first
	at  place
}

// current is the version in force as far as it is known here, nil for none.
func (v *versions) current() *version {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.cur
}

// saw takes a message of the given incarnation of the stream, in any order.
// A version that is not good moves the place and leaves the last good one in force.
func (v *versions) saw(stream string, m bus.Message) {
	next, err := v.decode(m)
	if err != nil {
		v.metrics.bad.Inc()
		v.log.Error().Err(err).Uint64("seq", m.Seq).Msg("a config version can't be read; the last good one stays")
		v.lookAfter()
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.at.stream != stream {
		v.at = place{stream: stream}
	} else if v.cur != nil && next != nil && next.Version <= v.cur.Version {
		next = nil
	}
	v.at.seq = max(v.at.seq, m.Seq)
	if next != nil {
		v.set(next)
	}
}

// set puts a version in force; mu is held.
func (v *versions) set(next *version) {
	v.cur = next
	v.metrics.version.Set(float64(next.Version))
	v.log.Info().Uint64("version", next.Version).Str("by", next.By).Str("via", next.Via).Msg("config version in force")
	if len(next.foreign) > 0 {
		v.log.Warn().Strs("keys", next.foreign).Msg("the config was written by a newer release; changes are refused here")
	}
}

func (v *versions) decode(m bus.Message) (*version, error) {
	cv, err := v.authentic(m)
	if err != nil {
		return nil, err
	}
	p, foreign, err := policy.Receive(cv.Document)
	if err != nil {
		return nil, err
	}
	return &version{cv, p, foreign}, nil
}

// authentic reads a version that a controlplane wrote. Its error is events.ErrType for a newer release's
// form, and events.ErrMalformed.
func (v *versions) authentic(m bus.Message) (events.ConfigVersion, error) {
	cv, err := events.DecodeConfig(m.Data, m.Seq)
	if err == nil && v.key != nil {
		err = cv.Verify(v.key.Public().(ed25519.PublicKey))
	}
	return cv, err
}

// forged says that no controlplane, of a newer release neither, wrote the message.
func (v *versions) forged(m bus.Message) bool {
	_, err := v.authentic(m)
	return errors.Is(err, events.ErrMalformed)
}

// forget makes the next message count whatever its sequence: the stream was made
// anew or lost its tail. The version in force stays until then.
func (v *versions) forget() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.at = place{}
}

// latest asks the stream where it ends and which version is in force there.
// The version is nil when the stream has no good one.
func (v *versions) latest(ctx context.Context) (*version, place, error) {
	state, err := v.bus.Stream(ctx, events.StreamConfig)
	if err != nil {
		if errors.Is(err, bus.ErrNoStream) {
			v.lookAfter()
		}
		return nil, place{}, err
	}
	last, err := v.bus.Last(ctx, events.StreamConfig, events.SubjectConfigUpdates)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		return nil, place{state.ID, state.Last}, nil
	case err != nil:
		return nil, place{}, err
	}
	v.mu.RLock()
	known := v.at.stream == state.ID && v.at.seq >= last.Seq
	v.mu.RUnlock()
	if !known {
		v.saw(state.ID, last)
	}
	return v.current(), place{state.ID, last.Seq}, nil
}

// numbered gives a version of the stream as it was stored; bus.ErrNotFound where it has none of that number.
func (v *versions) numbered(ctx context.Context, number uint64) (*version, error) {
	m, err := v.bus.At(ctx, events.StreamConfig, number)
	if err != nil {
		return nil, err
	}
	return v.decode(m)
}

// append stores a version at the place given. bus.ErrConflict says that somebody
// else was first; after bus.ErrUnavailable it may or may not have been stored.
func (v *versions) append(ctx context.Context, at place, c caller, p policy.Policy) (*version, error) {
	doc, err := policy.Encode(p)
	if err != nil {
		return nil, err
	}
	next := &version{
		ConfigVersion: events.ConfigVersion{Version: at.seq + 1, By: c.by, Via: c.via, Time: time.Now().UTC(), Actor: c.actor, Reason: c.reason, Document: doc},
		policy:        p,
	}
	if v.key != nil {
		if err := next.Sign(v.key); err != nil {
			return nil, err
		}
	}
	data, err := events.Encode(next.ConfigVersion)
	if err != nil {
		return nil, err
	}
	seq, err := v.bus.Publish(ctx, events.SubjectConfigUpdates, data, bus.WithLastSeq(at.seq))
	if err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.at.stream != at.stream || v.at.seq < seq {
		v.at = place{at.stream, seq}
		v.set(next)
	}
	return next, nil
}

// lookAfter has upkeep look at the streams now.
func (v *versions) lookAfter() {
	select {
	case v.amiss <- struct{}{}:
	default: // it is about to
	}
}

// upkeep provisions the streams, gives an empty config stream its first version and
// one that ends in no version the last good one, again and again until ctx ends.
func (v *versions) upkeep(ctx context.Context) error {
	failing := false
	for {
		err := v.provision(ctx)
		wait := upkeepEvery
		if err != nil {
			wait = upkeepRetry
			if !failing && v.bus.Connected() {
				v.log.Warn().Err(err).Msg("the streams are not in place; still trying")
				failing = true
			}
		} else {
			failing = false
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-v.amiss:
			t.Stop()
		case <-t.C:
		}
	}
}

func (v *versions) provision(ctx context.Context) error {
	if !v.bus.Connected() {
		return bus.ErrUnavailable
	}
	if err := v.bus.Provision(ctx, events.Streams()); err != nil {
		return err
	}
	state, err := v.bus.Stream(ctx, events.StreamConfig)
	if err != nil {
		return err
	}
	if state.Msgs > 0 {
		last, err := v.bus.Last(ctx, events.StreamConfig, events.SubjectConfigUpdates)
		if err != nil || !v.forged(last) || !v.search(ctx, state) {
			return err
		}
	}
	at := place{state.ID, state.Last}
	// A stream that was lost gets back what was in force; a new one what the file says.
	// Behind what is no version nobody who starts now would find the one in force.
	if cur := v.current(); cur != nil && (state.Msgs == 0 || len(cur.foreign) == 0) {
		_, err = v.append(ctx, at, caller{by: "controlplane", via: "restore"}, cur.policy)
	} else if v.initial != nil && state.Msgs == 0 {
		_, err = v.append(ctx, at, caller{by: "controlplane", via: "file"}, *v.initial)
	}
	if errors.Is(err, bus.ErrConflict) {
		return nil // another replica was first
	}
	return err
}

// errEnd ends a reading of the stream that found what it was for.
var errEnd = errors.New("end of the search")

// follow takes versions as they come, until ctx ends.
func (v *versions) follow(ctx context.Context) error {
	for ctx.Err() == nil {
		state, err := v.bus.Stream(ctx, events.StreamConfig)
		if err == nil {
			err = v.bus.Follow(ctx, events.StreamConfig, bus.LastPerSubject(), func(m bus.Message) error {
				v.saw(state.ID, m)
				if v.current() == nil {
					return errEnd
				}
				return nil
			}, bus.OfStream(state.ID))
		}
		pause := upkeepRetry
		switch {
		case errors.Is(err, errEnd):
			if !v.search(ctx, state) {
				pause = upkeepEvery
			}
		case errors.Is(err, bus.ErrStreamReset):
			v.log.Warn().Err(err).Msg("the config stream was reset")
			v.forget()
		}
		if sleep(ctx, pause) != nil {
			break
		}
	}
	return nil
}

// search finds the last good version of a stream whose last message is none.
func (v *versions) search(ctx context.Context, state bus.StreamState) bool {
	var good *bus.Message
	err := v.bus.Follow(ctx, events.StreamConfig, bus.All(), func(m bus.Message) error {
		if _, err := v.decode(m); err == nil {
			good = &m
		}
		if m.Seq >= state.Last {
			return errEnd
		}
		return nil
	}, bus.OfStream(state.ID))
	if !errors.Is(err, errEnd) || good == nil {
		return false
	}
	v.saw(state.ID, *good)
	return true
}

// sleep waits; its error is that of ctx.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

package stack

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// sample is the name of the upstream that the stack serves itself: whatever policy is
// in force, an upstream of this name is where the sample upstream listens now.
const sample = "sample"

// importable writes the policy that the controlplane imports while there is none, and
// gives its file. A policy kept from an earlier run stays; only the sample upstream's place
// in it is brought up to date, as a version of its own.
func (s *Stack) importable(ctx context.Context) (file string, err error) {
	p, err := s.configured()
	if err != nil {
		return "", err
	}
	doc, err := policy.Encode(s.pointed(p))
	if err != nil {
		return "", fmt.Errorf("--policy: %w", err)
	}
	file = filepath.Join(s.cfg.DataDir, "policy.import.json")
	if err := os.WriteFile(file, doc, 0o600); err != nil {
		return "", fmt.Errorf("--data-dir: %w", err)
	}
	return file, s.repoint(ctx)
}

// configured is the policy of --policy, or the sample.
func (s *Stack) configured() (policy.Policy, error) {
	doc := policy.Example()
	if s.cfg.Policy != "" {
		var err error
		if doc, err = os.ReadFile(s.cfg.Policy); err != nil {
			return policy.Policy{}, fmt.Errorf("--policy: %w", err)
		}
	}
	p, err := policy.Parse(doc)
	if err != nil {
		return policy.Policy{}, fmt.Errorf("--policy: %w", err)
	}
	return p, nil
}

// pointed is p with its sample upstream where that listens.
func (s *Stack) pointed(p policy.Policy) policy.Policy {
	u, ok := p.Upstreams[sample]
	if !ok {
		return p
	}
	u.URL = "http://" + s.upstreamAddr
	p.Upstreams = maps.Clone(p.Upstreams)
	p.Upstreams[sample] = u
	return p
}

// repoint provisions the streams, so that no service looks in vain, and appends a version to the config stream if the sample upstream has moved since the last.
func (s *Stack) repoint(ctx context.Context) error {
	b, err := s.connect(ctx, "aegis-up")
	if err != nil {
		return err
	}
	defer b.Close()
	if err := b.Provision(ctx, events.Streams()); err != nil {
		return err
	}
	last, err := b.Last(ctx, events.StreamConfig, events.SubjectConfigUpdates)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the policy kept in --data-dir: %w", err)
	}
	v, err := events.DecodeConfig(last.Data, last.Seq)
	if err != nil {
		return fmt.Errorf("the policy kept in --data-dir: %w", err)
	}
	s.reused = v.Version
	p, _, err := policy.Receive(v.Document)
	if err != nil {
		return fmt.Errorf("the policy kept in --data-dir: %w", err)
	}
	moved := s.pointed(p)
	if moved.Upstreams[sample].URL == p.Upstreams[sample].URL {
		return nil
	}
	doc, err := policy.Encode(moved)
	if err != nil {
		return err
	}
	next := events.ConfigVersion{Version: v.Version + 1, By: "aegis up", Via: "file", Time: time.Now().UTC(), Document: doc}
	wire, err := events.Encode(next)
	if err != nil {
		return err
	}
	if _, err := b.Publish(ctx, events.SubjectConfigUpdates, wire, bus.WithLastSubjectSeq(last.Seq)); err != nil {
		return fmt.Errorf("pointing the policy to the sample upstream: %w", err)
	}
	s.reused = next.Version
	return nil
}

// policyVersion is the version in force.
func (s *Stack) policyVersion(ctx context.Context) (uint64, error) {
	b, err := s.connect(ctx, "aegis-up")
	if err != nil {
		return 0, err
	}
	defer b.Close()
	last, err := b.Last(ctx, events.StreamConfig, events.SubjectConfigUpdates)
	if err != nil {
		return 0, fmt.Errorf("the policy in force: %w", err)
	}
	v, err := events.DecodeConfig(last.Data, last.Seq)
	if err != nil {
		return 0, fmt.Errorf("the policy in force: %w", err)
	}
	return v.Version, nil
}

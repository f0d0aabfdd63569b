package jetstream_test

import (
	"errors"
	"testing"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/rules"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore/jetstream"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore/rulestest"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	if err := b.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
	rulestest.Run(t, rulestest.Running(t, jetstream.New(b, zerolog.Nop())), rulestest.Running(t, jetstream.New(b, zerolog.Nop())), b)
}

// TestNATSAway: without NATS a change says that it may not have been made; with it again all is there.
func TestNATSAway(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	b := server.Bus(t)
	if err := b.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
	s := rulestest.Running(t, jetstream.New(b, zerolog.Nop()))
	if _, err := s.Create(t.Context(), rules.User{Name: "ann", Plan: "free"}); err != nil {
		t.Fatal(err)
	}
	server.Stop()
	if _, err := s.Create(t.Context(), rules.User{Name: "bea"}); !errors.Is(err, rulestore.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
	server.Restart()
	bustest.Await(t, "the user", func() bool {
		u, err := s.User(t.Context(), "ann")
		return err == nil && u.Plan == "free"
	})
	later := rulestest.Running(t, jetstream.New(b, zerolog.Nop()))
	bustest.Await(t, "a store that starts later", func() bool {
		users, err := later.Users(t.Context(), rulestore.Query{Limit: 5})
		return err == nil && len(users) == 1
	})
}

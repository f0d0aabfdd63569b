package postgres_test

import (
	"errors"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/rules"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore/pgtest"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore/postgres"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore/rulestest"
)

func open(t testing.TB, cfg postgres.Config, b *bus.Bus) *postgres.Store {
	t.Helper()
	s, err := postgres.New(cfg, b, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return rulestest.Running(t, s)
}

func provision(t testing.TB, b *bus.Bus) {
	t.Helper()
	if err := b.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
}

func TestConformance(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b)
	db := pgtest.Start(t)
	cfg := postgres.Config{DSN: db.DSN, ReadDSN: db.DSN}
	rulestest.Run(t, open(t, cfg, b), open(t, cfg, b), b)
}

func inBucket(t testing.TB, b *bus.Bus, name string) *rules.User {
	t.Helper()
	key := rules.UserKey(name)
	m, err := b.Get(t.Context(), events.StreamRules, events.SubjectRules(key))
	if err != nil {
		return nil
	}
	r, err := rules.Decode(key, m.Data)
	if err != nil {
		t.Fatal(err)
	}
	return r.User
}

// TestPublishesWhatIsMissing: NATS away, the bucket lost, PostgreSQL away, changes by hand: in the end the
// bucket has what PostgreSQL has.
func TestPublishesWhatIsMissing(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	b := server.Bus(t)
	provision(t, b)
	db := pgtest.Start(t)
	s := open(t, postgres.Config{DSN: db.DSN}, b)
	bustest.Await(t, "the tables", func() bool {
		_, err := s.Create(t.Context(), rules.User{Name: "ann", Plan: "free"})
		return err == nil
	})
	bustest.Await(t, "ann in the bucket", func() bool { return inBucket(t, b, "ann") != nil })

	server.Stop()
	if _, err := s.Create(t.Context(), rules.User{Name: "bea", Plan: "free"}); err != nil {
		t.Fatalf("a change while NATS is away: %v", err)
	}
	server.Restart()
	bustest.Await(t, "bea in the bucket", func() bool { return inBucket(t, b, "bea") != nil })

	// A bucket that takes nothing: what it refused is published when it takes it.
	resize := func(bytes int64) {
		t.Helper()
		for _, st := range events.Streams() {
			if st.Name == events.StreamRules {
				st.MaxBytes = bytes
				if err := b.Provision(t.Context(), []events.Stream{st}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	resize(1)
	if _, err := s.Create(t.Context(), rules.User{Name: "full", Plan: "free"}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second) // it is tried, and refused
	resize(1 << 30)
	bustest.Await(t, "what a full bucket refused", func() bool { return inBucket(t, b, "full") != nil })

	// By hand, several at once, one of them no valid user.
	db.Exec(t, "INSERT INTO users (name, plan) VALUES ('cid', 'free'), ('dee', 'free'), ('Not Valid', '')")
	bustest.Await(t, "those made by hand", func() bool { return inBucket(t, b, "cid") != nil && inBucket(t, b, "dee") != nil })
	db.Exec(t, "DELETE FROM users WHERE name = 'cid'")
	bustest.Await(t, "one deleted by hand", func() bool { return inBucket(t, b, "cid") == nil })

	db.Stop(t)
	if _, err := s.User(t.Context(), "ann"); !errors.Is(err, rulestore.ErrUnavailable) {
		t.Errorf("without PostgreSQL: %v", err)
	}
	if inBucket(t, b, "ann") == nil {
		t.Error("the bucket lost what PostgreSQL has")
	}
	db.Start(t)
	bustest.Await(t, "a change after the restart", func() bool {
		_, err := s.Update(t.Context(), "ann", func(u *rules.User) error { u.Plan = "growth"; return nil })
		return err == nil
	})
	bustest.Await(t, "the change in the bucket", func() bool { u := inBucket(t, b, "ann"); return u != nil && u.Plan == "growth" })

	// A bucket made anew gets everything again.
	server.DeleteStream(t, events.StreamRules)
	provision(t, b)
	bustest.Await(t, "all of it in a new bucket", func() bool {
		return inBucket(t, b, "ann") != nil && inBucket(t, b, "bea") != nil && inBucket(t, b, "dee") != nil
	})
}

// TestReplica: reads go to the replica, and to the primary when it is away.
func TestReplica(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b)
	primary := pgtest.Start(t)
	// What stands for the replica has its own user: so it is seen who answers.
	primary.Exec(t, "CREATE DATABASE replica")
	proxy := bustest.NewProxy(t, primary.Addr)
	replica := "postgres://aegis@" + proxy.Addr() + "/replica?sslmode=disable"
	other := open(t, postgres.Config{DSN: replica}, b)
	bustest.Await(t, "the replica's tables", func() bool {
		_, err := other.Create(t.Context(), rules.User{Name: "ann", Plan: "replica"})
		return err == nil
	})
	s := open(t, postgres.Config{DSN: primary.DSN, ReadDSN: replica}, b)
	bustest.Await(t, "the primary's tables", func() bool {
		_, err := s.Create(t.Context(), rules.User{Name: "ann", Plan: "primary"})
		return err == nil
	})
	if u, err := s.User(t.Context(), "ann"); err != nil || u.Plan != "replica" {
		t.Errorf("a read: %+v, %v", u, err)
	}
	if u, err := s.Update(t.Context(), "ann", func(*rules.User) error { return nil }); err != nil || u.Plan != "primary" {
		t.Errorf("a change reads the primary: %+v, %v", u, err)
	}
	proxy.Cut()
	if u, err := s.User(t.Context(), "ann"); err != nil || u.Plan != "primary" {
		t.Errorf("a read without the replica: %+v, %v", u, err)
	}
}

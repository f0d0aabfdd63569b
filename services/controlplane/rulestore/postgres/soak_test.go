//go:build soak

package postgres_test

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/rules"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore/pgtest"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore/postgres"
)

// TestMillionUsers loads a million users with a key each, and reports what lists, look-ups, changes and
// publishing take.
func TestMillionUsers(t *testing.T) {
	const users = 1_000_000
	b := bustest.Start(t).Bus(t)
	provision(t, b)
	db := pgtest.Start(t)
	s := open(t, postgres.Config{DSN: db.DSN}, b)
	bustest.Await(t, "the tables", func() bool { _, err := s.Plans(t.Context()); return err == nil })
	c, err := pgx.Connect(t.Context(), db.DSN)
	if err != nil {
		t.Fatal(err)
	}
	name := func(i int) string { return fmt.Sprintf("user-%07d", i) }
	begin := time.Now()
	for _, load := range []struct {
		table   string
		columns []string
		row     func(i int) []any
	}{
		{"users", []string{"name", "plan"}, func(i int) []any { return []any{name(i), "free"} }},
		{"api_keys", []string{"hash", "user_name"}, func(i int) []any { h := sha256.Sum256([]byte(name(i))); return []any{h[:], name(i)} }},
	} {
		i := 0
		if _, err := c.CopyFrom(t.Context(), pgx.Identifier{load.table}, load.columns, pgx.CopyFromFunc(func() ([]any, error) {
			if i == users {
				return nil, nil
			}
			i++
			return load.row(i - 1), nil
		})); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("COPY of %d users and keys: %v", users, time.Since(begin).Round(time.Second))
	if _, err := c.Exec(t.Context(), "ANALYZE"); err != nil {
		t.Fatal(err)
	}
	measure := func(what string, n int, fn func(i int) error) {
		took := make([]time.Duration, n)
		for i := range took {
			at := time.Now()
			if err := fn(i); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			took[i] = time.Since(at)
		}
		slices.Sort(took)
		t.Logf("%s: median %v, p99 %v", what, took[n/2], took[n*99/100])
	}
	place := func(i int) int { return i * 7919 % users }
	measure("a page of 100 users from anywhere", 500, func(i int) error {
		page, err := s.Users(t.Context(), rulestore.Query{After: name(place(i)), Limit: 100})
		if err == nil && len(page) == 0 {
			err = fmt.Errorf("empty after %s", name(place(i)))
		}
		return err
	})
	measure("a user by name", 2000, func(i int) error { _, err := s.User(t.Context(), name(place(i))); return err })
	measure("a user by key", 2000, func(i int) error { _, err := s.UserByKey(t.Context(), rules.HashOf(name(place(i)))); return err })
	measure("a change", 500, func(i int) error {
		_, err := s.Update(t.Context(), name(place(i)), func(u *rules.User) error { u.Plan = "growth"; return nil })
		return err
	})
	// Publishing goes on beside all of it.
	at := time.Now()
	before, err := b.Stream(t.Context(), events.StreamRules)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(20 * time.Second) // the measure itself
	after, err := b.Stream(t.Context(), events.StreamRules)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("publishing to the bucket: %.0f records a second, %d bytes for each", float64(after.Last-before.Last)/time.Since(at).Seconds(), after.Bytes/max(1, after.Msgs))
}

package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/rules"
)

const (
	// Advisory locks: one controlplane at a time migrates, one publishes.
	migrateLock = 0x6165676973 // "aegis"
	publishLock = migrateLock + 1

	// batch is how many changes are published in one go, inFlight how many at once.
	batch    = 2000
	inFlight = 64
	// lookEvery is how often changes are looked for without having been told of any.
	lookEvery = time.Second
)

// Run migrates the tables, and publishes changes until ctx ends. Of several controlplanes one publishes,
// as long as its connection lasts: so what is published last is what was read last.
func (s *Store) Run(ctx context.Context) error {
	failing := false
	for ctx.Err() == nil {
		err := s.run(ctx)
		if ctx.Err() != nil {
			break
		}
		if err != nil && !failing {
			s.log.Warn().Err(err).Msg("the rules of PostgreSQL are not published; still trying")
		}
		failing = err != nil
		select {
		case <-ctx.Done():
		case <-time.After(lookEvery):
		}
	}
	return nil
}

func (s *Store) run(ctx context.Context) error {
	if !s.migrated.Load() {
		if err := s.migrate(ctx); err != nil {
			return fmt.Errorf("migrate: %w", err)
		}
		s.migrated.Store(true)
	}
	conn, err := s.db.Acquire(ctx)
	if err != nil {
		return err
	}
	// The lock belongs to the connection, and must end with this call.
	defer func() {
		raw := conn.Hijack()
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = raw.Close(closing)
	}()
	var mine bool
	if err := conn.QueryRow(ctx, "SELECT pg_try_advisory_lock($1)", publishLock).Scan(&mine); err != nil || !mine {
		return err
	}
	if _, err := conn.Exec(ctx, "LISTEN rules_changes"); err != nil {
		return err
	}
	for {
		if err := s.publishAll(ctx, conn); err != nil {
			return err
		}
		wait, cancel := context.WithTimeout(ctx, lookEvery)
		_, err := conn.Conn().WaitForNotification(wait)
		cancel()
		if ctx.Err() != nil || err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
	}
}

// publishAll publishes until no change is left; of a bucket that was made anew, everything.
func (s *Store) publishAll(ctx context.Context, conn *pgxpool.Conn) error {
	state, err := s.bus.Stream(ctx, events.StreamRules)
	if err != nil {
		return err
	}
	if err := s.adopt(ctx, conn, state.ID); err != nil {
		return err
	}
	for {
		n, err := s.publish(ctx, conn)
		if err != nil || n == 0 {
			return err
		}
	}
}

// adopt marks everything as changed where the bucket is not the one that was published to.
func (s *Store) adopt(ctx context.Context, conn *pgxpool.Conn, bucket string) error {
	var known string
	err := conn.QueryRow(ctx, "SELECT bucket FROM rules_published").Scan(&known)
	if err == nil && known == bucket {
		return nil
	}
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return err
	}
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		for _, sql := range []string{
			"INSERT INTO rules_changes (thing, name) SELECT 'plan', name FROM plans",
			"INSERT INTO rules_changes (thing, name) SELECT 'user', name FROM users",
			"INSERT INTO rules_changes (thing, name) SELECT 'key', encode(hash, 'hex') FROM api_keys",
		} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, "INSERT INTO rules_published (bucket) VALUES ($1) ON CONFLICT (one) DO UPDATE SET bucket = $1", bucket)
		return err
	})
}

// publish publishes the oldest changes as things stand now, and gives how many they were.
func (s *Store) publish(ctx context.Context, conn *pgxpool.Conn) (int, error) {
	rows, err := conn.Query(ctx, "SELECT id, thing, name FROM rules_changes ORDER BY id LIMIT $1", batch)
	if err != nil {
		return 0, err
	}
	var ids []int64
	named := map[string]map[string]bool{"user": {}, "key": {}, "plan": {}}
	var id int64
	var thing, name string
	if _, err := pgx.ForEachRow(rows, []any{&id, &thing, &name}, func() error {
		ids = append(ids, id)
		if named[thing] != nil {
			named[thing][name] = true
		}
		return nil
	}); err != nil || len(ids) == 0 {
		return 0, err
	}
	records, err := s.records(ctx, conn, named)
	if err != nil {
		return 0, err
	}
	g, sending := errgroup.WithContext(ctx)
	g.SetLimit(inFlight)
	for key, data := range records {
		g.Go(func() error {
			var opts []bus.PublishOption
			if data == nil {
				opts = append(opts, bus.WithDelete())
			}
			_, err := s.bus.Publish(sending, events.SubjectRules(key), data, opts...)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return 0, err
	}
	_, err = conn.Exec(ctx, "DELETE FROM rules_changes WHERE id = ANY($1)", ids)
	return len(ids), err
}

// records are what the bucket is to have of the things named; nil where they are gone.
func (s *Store) records(ctx context.Context, conn *pgxpool.Conn, named map[string]map[string]bool) (map[string][]byte, error) {
	records := map[string][]byte{}
	names := func(thing string, key func(string) string) []string {
		var all []string
		for name := range named[thing] {
			all = append(all, name)
			records[key(name)] = nil
		}
		return all
	}
	put := func(key string, data []byte, err error) {
		if err != nil { // somebody wrote it by hand; edges keep what they know
			s.log.Error().Err(err).Str("key", key).Msg("a record of PostgreSQL is not valid, and not published")
			delete(records, key)
			return
		}
		records[key] = data
	}
	users, err := queryUsers(ctx, conn, "WHERE name = ANY($1)", names("user", rules.UserKey))
	if err != nil {
		return nil, err
	}
	for _, u := range users {
		data, err := rules.EncodeUser(u)
		put(rules.UserKey(u.Name), data, err)
	}
	plans, err := queryPlans(ctx, conn, "WHERE name = ANY($1)", names("plan", rules.PlanKey))
	if err != nil {
		return nil, err
	}
	for _, p := range plans {
		data, err := rules.EncodePlan(p)
		put(rules.PlanKey(p.Name), data, err)
	}
	rows, err := conn.Query(ctx, "SELECT encode(hash, 'hex'), user_name FROM api_keys WHERE hash = ANY(SELECT decode(h, 'hex') FROM unnest($1::text[]) h)", names("key", rules.HashKey))
	if err != nil {
		return nil, err
	}
	var hash, owner string
	_, err = pgx.ForEachRow(rows, []any{&hash, &owner}, func() error {
		data, err := rules.EncodeOwner(owner)
		put(rules.HashKey(hash), data, err)
		return nil
	})
	return records, err
}

// Package postgres keeps the rules in PostgreSQL, and publishes what changes there to the bucket that
// edges read, whoever changed it.
package postgres

import (
	"context"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/rules"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore"
)

// timeout bounds one operation.
const timeout = 5 * time.Second

//go:embed migrations/*.sql
var migrations embed.FS

// Config says where PostgreSQL is.
type Config struct {
	// DSN is a URL or keywords as libpq has them, ReadDSN that of a replica for reads; "": the same.
	DSN, ReadDSN string
	// Password, if set, is used for both.
	Password string
}

// Store is a rulestore.Store in PostgreSQL.
type Store struct {
	db, replica *pgxpool.Pool // replica is db where there is none
	bus         *bus.Bus
	log         zerolog.Logger
	migrated    atomic.Bool
}

var _ rulestore.Store = (*Store)(nil)

// New returns a store; it needs no answer from PostgreSQL. Run migrates it. Close it afterwards.
func New(cfg Config, b *bus.Bus, log zerolog.Logger) (*Store, error) {
	s := &Store{bus: b, log: log}
	var err error
	if s.db, err = open(cfg.DSN, cfg.Password); err != nil {
		return nil, fmt.Errorf("rules-dsn: %w", err)
	}
	s.replica = s.db
	if cfg.ReadDSN != "" {
		if s.replica, err = open(cfg.ReadDSN, cfg.Password); err != nil {
			s.db.Close()
			return nil, fmt.Errorf("rules-read-dsn: %w", err)
		}
	}
	return s, nil
}

func open(dsn, password string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, errors.New("not a DSN, such as postgres://aegis@127.0.0.1/aegis") // err may show the password
	}
	if password != "" {
		cfg.ConnConfig.Password = password
	}
	cfg.ConnConfig.ConnectTimeout = timeout
	return pgxpool.NewWithConfig(context.Background(), cfg)
}

// Close closes all connections.
func (s *Store) Close() {
	if s.replica != s.db {
		s.replica.Close()
	}
	s.db.Close()
}

// About implements rulestore.Store.
func (s *Store) About() string { return "PostgreSQL" }

// migrate brings the tables up to date. Several controlplanes may do it at once.
func (s *Store) migrate(ctx context.Context) error {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	// One at a time: goose's own lock would poll.
	conn, err := s.db.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", migrateLock); err != nil {
		return err
	}
	defer conn.Exec(context.WithoutCancel(ctx), "SELECT pg_advisory_unlock($1)", migrateLock)
	db := stdlib.OpenDBFromPool(s.db)
	defer db.Close()
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files, goose.WithTableName("aegis_migrations"))
	if err != nil {
		return err
	}
	_, err = provider.Up(ctx)
	return err
}

// failure says by rulestore's errors what went wrong.
func failure(err error) error {
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrNoRows):
		return rulestore.ErrNotFound
	case errors.As(err, &pg) && pg.Code == "23505": // unique_violation
		return fmt.Errorf("%w: %s", rulestore.ErrExists, pg.ConstraintName)
	default:
		return fmt.Errorf("%w: %w", rulestore.ErrUnavailable, err)
	}
}

// querier is a pool, a connection or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// read runs a query on the replica, and where that is away on the primary.
func (s *Store) read(ctx context.Context, query func(context.Context, querier) error) error {
	if !s.migrated.Load() {
		return fmt.Errorf("%w: its tables are not in place yet", rulestore.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if s.replica == s.db {
		return query(ctx, s.db)
	}
	half, stop := context.WithTimeout(ctx, timeout/2)
	err := query(half, s.replica)
	stop()
	if errors.Is(err, rulestore.ErrUnavailable) {
		s.log.Warn().Err(err).Msg("the replica of the rules does not answer; reading from the primary")
		err = query(ctx, s.db)
	}
	return err
}

const selectUsers = `SELECT name, plan, admin, block, created, updated,
	(SELECT coalesce(json_agg(json_build_object('hash', encode(hash, 'hex'), 'label', label, 'created', k.created, 'expires', k.expires) ORDER BY hash), '[]')
		FROM api_keys k WHERE user_name = name),
	(SELECT coalesce(json_agg(spec || jsonb_strip_nulls(jsonb_build_object('route', route, 'expires', o.expires)) ORDER BY route), '[]')
		FROM overrides o WHERE user_name = name)
	FROM users `

func queryUsers(ctx context.Context, db querier, where string, args ...any) ([]rules.User, error) {
	rows, err := db.Query(ctx, selectUsers+where, args...)
	if err != nil {
		return nil, failure(err)
	}
	users, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (u rules.User, err error) {
		var block, keys, overrides []byte
		if err = row.Scan(&u.Name, &u.Plan, &u.Admin, &block, &u.Created, &u.Updated, &keys, &overrides); err != nil {
			return u, err
		}
		u.Created, u.Updated = u.Created.UTC(), u.Updated.UTC()
		if block != nil {
			err = json.Unmarshal(block, &u.Block)
		}
		err = errors.Join(err, json.Unmarshal(keys, &u.Keys), json.Unmarshal(overrides, &u.Overrides))
		normalise(&u)
		return u, err
	})
	return users, failure(err)
}

// normalise makes what JSON has as text and empty lists what they were.
func normalise(u *rules.User) {
	for i := range u.Keys {
		u.Keys[i].Created = u.Keys[i].Created.UTC()
		if !u.Keys[i].Expires.IsZero() {
			u.Keys[i].Expires = u.Keys[i].Expires.UTC()
		}
	}
	for i := range u.Overrides {
		if !u.Overrides[i].Expires.IsZero() {
			u.Overrides[i].Expires = u.Overrides[i].Expires.UTC()
		}
	}
	if len(u.Keys) == 0 {
		u.Keys = nil
	}
	if len(u.Overrides) == 0 {
		u.Overrides = nil
	}
}

func one(users []rules.User, err error) (rules.User, error) {
	if err == nil && len(users) == 0 {
		err = rulestore.ErrNotFound
	}
	if err != nil {
		return rules.User{}, err
	}
	return users[0], nil
}

// User implements rulestore.Store.
func (s *Store) User(ctx context.Context, name string) (u rules.User, err error) {
	err = s.read(ctx, func(ctx context.Context, db querier) (err error) {
		u, err = one(queryUsers(ctx, db, "WHERE name = $1", name))
		return err
	})
	return u, err
}

// UserByKey implements rulestore.Store.
func (s *Store) UserByKey(ctx context.Context, hash string) (u rules.User, err error) {
	digest, err := hex.DecodeString(hash)
	if err != nil {
		return u, rulestore.ErrNotFound
	}
	err = s.read(ctx, func(ctx context.Context, db querier) (err error) {
		u, err = one(queryUsers(ctx, db, "WHERE name = (SELECT user_name FROM api_keys WHERE hash = $1)", digest))
		return err
	})
	return u, err
}

// Users implements rulestore.Store.
func (s *Store) Users(ctx context.Context, q rulestore.Query) (users []rules.User, err error) {
	// Names of addresses begin with "ip:", and those of users have no colon: a range of the primary key.
	where := "WHERE name > $1 AND NOT (name >= 'ip:' AND name < 'ip;') AND ($2 = '' OR plan = $2) ORDER BY name LIMIT $3"
	if q.Addresses {
		where = "WHERE name > $1 AND name >= 'ip:' AND name < 'ip;' AND ($2 = '' OR plan = $2) ORDER BY name LIMIT $3"
	}
	err = s.read(ctx, func(ctx context.Context, db querier) (err error) {
		users, err = queryUsers(ctx, db, where, q.After, q.Plan, q.Limit)
		return err
	})
	return users, err
}

// Create implements rulestore.Store.
func (s *Store) Create(ctx context.Context, u rules.User) (rules.User, error) {
	u.Created = rulestore.Now()
	u.Updated = u.Created
	err := s.change(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "INSERT INTO users (name, plan, admin, block, created, updated) VALUES ($1, $2, $3, $4, $5, $5)",
			u.Name, u.Plan, u.Admin, blockOf(u), u.Created)
		if err != nil {
			return failure(err)
		}
		return insertParts(ctx, tx, u)
	})
	return u, err
}

// Update implements rulestore.Store.
func (s *Store) Update(ctx context.Context, name string, change func(*rules.User) error) (u rules.User, err error) {
	err = s.change(ctx, func(ctx context.Context, tx pgx.Tx) error {
		// Locked first: a query that waits for a lock sees the rest as it was before.
		if _, err := tx.Exec(ctx, "SELECT FROM users WHERE name = $1 FOR UPDATE", name); err != nil {
			return failure(err)
		}
		if u, err = one(queryUsers(ctx, tx, "WHERE name = $1", name)); err != nil {
			return err
		}
		if err := change(&u); err != nil {
			return err
		}
		u.Updated = rulestore.Now()
		for _, sql := range []string{"DELETE FROM api_keys WHERE user_name = $1", "DELETE FROM overrides WHERE user_name = $1"} {
			if _, err := tx.Exec(ctx, sql, name); err != nil {
				return failure(err)
			}
		}
		if _, err := tx.Exec(ctx, "UPDATE users SET plan = $2, admin = $3, block = $4, updated = $5 WHERE name = $1",
			name, u.Plan, u.Admin, blockOf(u), u.Updated); err != nil {
			return failure(err)
		}
		return insertParts(ctx, tx, u)
	})
	if err != nil {
		return rules.User{}, err
	}
	return u, nil
}

func blockOf(u rules.User) any {
	if u.Block == nil {
		return nil
	}
	return u.Block
}

func insertParts(ctx context.Context, tx pgx.Tx, u rules.User) error {
	var b pgx.Batch
	for _, k := range u.Keys {
		digest, err := hex.DecodeString(k.Hash)
		if err != nil {
			return err
		}
		b.Queue("INSERT INTO api_keys (hash, user_name, label, created, expires) VALUES ($1, $2, $3, $4, $5)",
			digest, u.Name, k.Label, k.Created, orNull(k.Expires))
	}
	for _, o := range u.Overrides {
		spec := o
		spec.Route, spec.Expires = "", time.Time{}
		b.Queue("INSERT INTO overrides (user_name, route, spec, expires) VALUES ($1, $2, $3, $4)", u.Name, o.Route, spec, orNull(o.Expires))
	}
	return failure(tx.SendBatch(ctx, &b).Close())
}

func orNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// change runs fn in a transaction.
func (s *Store) change(ctx context.Context, fn func(context.Context, pgx.Tx) error) error {
	if !s.migrated.Load() {
		return fmt.Errorf("%w: its tables are not in place yet", rulestore.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var own error
	err := pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		own = fn(ctx, tx)
		return own
	})
	if own != nil {
		return own
	}
	return failure(err)
}

// Delete implements rulestore.Store.
func (s *Store) Delete(ctx context.Context, name string) error {
	return s.change(ctx, func(ctx context.Context, tx pgx.Tx) error {
		done, err := tx.Exec(ctx, "DELETE FROM users WHERE name = $1", name)
		if err == nil && done.RowsAffected() == 0 {
			return rulestore.ErrNotFound
		}
		return failure(err)
	})
}

// Plans implements rulestore.Store.
func (s *Store) Plans(ctx context.Context) (plans []rules.Plan, err error) {
	err = s.read(ctx, func(ctx context.Context, db querier) (err error) {
		plans, err = queryPlans(ctx, db, "")
		return err
	})
	return plans, err
}

func queryPlans(ctx context.Context, db querier, where string, args ...any) ([]rules.Plan, error) {
	rows, err := db.Query(ctx, "SELECT name, spec FROM plans "+where+" ORDER BY name", args...)
	if err != nil {
		return nil, failure(err)
	}
	plans, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p rules.Plan, err error) {
		return p, row.Scan(&p.Name, &p.Plan)
	})
	return plans, failure(err)
}

// PutPlan implements rulestore.Store.
func (s *Store) PutPlan(ctx context.Context, p rules.Plan) error {
	return s.change(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "INSERT INTO plans (name, spec) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET spec = $2", p.Name, p.Plan)
		return failure(err)
	})
}

// DeletePlan implements rulestore.Store.
func (s *Store) DeletePlan(ctx context.Context, name string) error {
	return s.change(ctx, func(ctx context.Context, tx pgx.Tx) error {
		done, err := tx.Exec(ctx, "DELETE FROM plans WHERE name = $1 AND NOT EXISTS (SELECT FROM users WHERE plan = $1)", name)
		if err != nil || done.RowsAffected() > 0 {
			return failure(err)
		}
		plans, err := queryPlans(ctx, tx, "WHERE name = $1", name)
		if err == nil && len(plans) == 0 {
			return rulestore.ErrNotFound
		} else if err == nil {
			return fmt.Errorf("%w: users have plan %s", rulestore.ErrInUse, name)
		}
		return err
	})
}

// Package rulestore keeps the rules of single clients (see pkg/rules) where they can be edited: in PostgreSQL
// (package postgres), or without it in the bucket that edges read (package jetstream). Package rulestest
// holds both to the same behaviour.
package rulestore

import (
	"context"
	"errors"
	"time"

	"github.com/aegisrate/aegisrate/pkg/rules"
)

var (
	// ErrNotFound: there is no such user, address, key or plan. Nothing was changed.
	ErrNotFound = errors.New("rulestore: not found")
	// ErrExists: the name, or a key, is taken. Nothing was changed.
	ErrExists = errors.New("rulestore: exists already")
	// ErrInUse: users have the plan. Nothing was changed.
	ErrInUse = errors.New("rulestore: in use")
	// ErrUnavailable: the store gave no answer; a change may or may not have been made.
	ErrUnavailable = errors.New("rulestore: unavailable")
)

// MaxPage bounds one page of a list.
const MaxPage = 1000

// Query says which users to list.
type Query struct {
	// After is the last name of the page before; "" begins. Limit is at most MaxPage.
	After string
	Limit int
	// Plan, if set, lists its users only. Addresses lists addresses in place of users.
	Plan      string
	Addresses bool
}

// Store keeps users and plans. What it takes is valid already (rules.User.Validate). Every change is
// whole or not at all, and reaches the bucket that edges read: at once or, where NATS is away, when it is
// back. All methods are safe for concurrent use, by any number of replicas.
type Store interface {
	// User is a user or an address by name. ErrNotFound.
	User(ctx context.Context, name string) (rules.User, error)
	// UserByKey is whose key has that hash. ErrNotFound.
	UserByKey(ctx context.Context, hash string) (rules.User, error)
	// Users are those after q.After in the order of their names' bytes.
	Users(ctx context.Context, q Query) ([]rules.User, error)
	// Create adds a user. ErrExists where the name or one of its keys is taken.
	Create(ctx context.Context, u rules.User) (rules.User, error)
	// Update changes a user by change, which may be called several times; its error is returned, and then
	// nothing was changed. ErrNotFound; ErrExists where a key is somebody else's.
	Update(ctx context.Context, name string, change func(*rules.User) error) (rules.User, error)
	// Delete removes a user with its keys. ErrNotFound.
	Delete(ctx context.Context, name string) error

	// Plans are all plans by name.
	Plans(ctx context.Context) ([]rules.Plan, error)
	// PutPlan adds a plan or replaces the one of its name.
	PutPlan(ctx context.Context, p rules.Plan) error
	// DeletePlan removes a plan. ErrNotFound; ErrInUse where users have it.
	DeletePlan(ctx context.Context, name string) error

	// Run keeps the store going until ctx ends.
	Run(ctx context.Context) error
	// About names the store, for people.
	About() string
}

// Now is the time as stores keep it: whole microseconds, as PostgreSQL has them.
func Now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

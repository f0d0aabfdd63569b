// Package jetstream keeps the rules in the KV bucket that edges read, and nowhere else. In memory is an
// index of names, folded from the bucket's stream; records are read when they are asked for.
package jetstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"github.com/tidwall/btree"
	"golang.org/x/sync/errgroup"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/rules"
	"github.com/aegisrate/aegisrate/services/controlplane/rulestore"
)

const (
	// tries bounds how often a change is made again because somebody else was first.
	tries = 20
	// catchUp bounds the wait until the index has a change.
	catchUp = 5 * time.Second
	retry   = 250 * time.Millisecond
	// reads is how many records of a page are read at once.
	reads = 16
)

// Store is a rulestore.Store in JetStream.
type Store struct {
	bus *bus.Bus
	log zerolog.Logger

	mu      sync.Mutex
	names   btree.Map[string, string] // users and addresses; their plans
	plans   map[string]rules.Plan
	applied uint64
	ready   bool
	moved   chan struct{} // closed and replaced when applied moves
}

var _ rulestore.Store = (*Store)(nil)

// New returns a store on b. Its lists are there once Run has read the bucket.
func New(b *bus.Bus, log zerolog.Logger) *Store {
	return &Store{bus: b, log: log, plans: map[string]rules.Plan{}, moved: make(chan struct{})}
}

// About implements rulestore.Store.
func (s *Store) About() string { return "JetStream" }

// Run folds the bucket's stream into the index until ctx ends.
func (s *Store) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		state, err := s.bus.Stream(ctx, events.StreamRules)
		if err == nil {
			s.begin(state)
			err = s.bus.Follow(ctx, events.StreamRules, bus.All(), func(m bus.Message) error {
				s.apply(m, state.Last)
				return nil
			}, bus.OfStream(state.ID))
		}
		s.log.Debug().Err(err).Msg("the rules can't be followed now")
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
	}
	return nil
}

func (s *Store) begin(state bus.StreamState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.names.Clear()
	s.plans, s.applied, s.ready = map[string]rules.Plan{}, 0, state.Msgs == 0
}

func (s *Store) apply(m bus.Message, last uint64) {
	r, err := rules.Decode(events.RulesKey(m.Subject), m.Data)
	if err != nil {
		s.log.Error().Err(err).Uint64("seq", m.Seq).Msg("a record of the rules can't be read")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil || r.Hash != "":
	case events.RulesKey(m.Subject) == rules.PlanKey(r.Name):
		delete(s.plans, r.Name)
		if !r.Gone {
			s.plans[r.Name] = *r.Plan
		}
	case r.Gone:
		s.names.Delete(r.Name)
	default:
		s.names.Set(r.Name, strings.Clone(r.User.Plan))
	}
	s.applied = m.Seq
	s.ready = s.ready || m.Seq >= last
	close(s.moved)
	s.moved = make(chan struct{})
}

// await waits until the index has what was stored under seq, so that a writer reads its own writes. A
// change that is stored stays so when the wait is cut short.
func (s *Store) await(ctx context.Context, seq uint64) {
	ctx, cancel := context.WithTimeout(ctx, catchUp)
	defer cancel()
	for {
		s.mu.Lock()
		done, moved := s.applied >= seq, s.moved
		s.mu.Unlock()
		if done {
			return
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return
		}
	}
}

// get reads a record and its sequence, 0 where there never was one. rulestore.ErrNotFound: it is not there.
func (s *Store) get(ctx context.Context, key string) (rules.Record, uint64, error) {
	m, err := s.bus.Get(ctx, events.StreamRules, events.SubjectRules(key))
	if errors.Is(err, bus.ErrNotFound) {
		return rules.Record{}, 0, rulestore.ErrNotFound
	}
	if err != nil {
		return rules.Record{}, 0, fmt.Errorf("%w: %w", rulestore.ErrUnavailable, err)
	}
	r, err := rules.Decode(key, m.Data)
	if err == nil && r.Gone {
		err = rulestore.ErrNotFound
	}
	return r, m.Seq, err
}

// put stores a record, nil for its end, if seq is still the last of its key; bus.ErrConflict otherwise.
func (s *Store) put(ctx context.Context, key string, data []byte, seq uint64) (uint64, error) {
	opts := []bus.PublishOption{bus.WithLastSubjectSeq(seq)}
	if data == nil {
		opts = append(opts, bus.WithDelete())
	}
	stored, err := s.bus.Publish(ctx, events.SubjectRules(key), data, opts...)
	if err != nil && !errors.Is(err, bus.ErrConflict) {
		err = fmt.Errorf("%w: %w", rulestore.ErrUnavailable, err)
	}
	return stored, err
}

// User implements rulestore.Store.
func (s *Store) User(ctx context.Context, name string) (rules.User, error) {
	r, _, err := s.get(ctx, rules.UserKey(name))
	if err != nil {
		return rules.User{}, err
	}
	return *r.User, nil
}

// UserByKey implements rulestore.Store.
func (s *Store) UserByKey(ctx context.Context, hash string) (rules.User, error) {
	if !rules.ValidHash(hash) {
		return rules.User{}, rulestore.ErrNotFound
	}
	r, _, err := s.get(ctx, rules.HashKey(hash))
	if err != nil {
		return rules.User{}, err
	}
	u, err := s.User(ctx, r.Owner)
	if err == nil && !u.HasKey(hash, time.Time{}) {
		return rules.User{}, rulestore.ErrNotFound
	}
	return u, err
}

// Users implements rulestore.Store.
func (s *Store) Users(ctx context.Context, q rulestore.Query) ([]rules.User, error) {
	names, err := s.page(q)
	if err != nil {
		return nil, err
	}
	found := make([]*rules.User, len(names))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(reads)
	for i, name := range names {
		g.Go(func() error {
			u, err := s.User(ctx, name)
			if err == nil {
				found[i] = &u
			} else if errors.Is(err, rulestore.ErrNotFound) {
				return nil // deleted meanwhile
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	users := make([]rules.User, 0, len(found))
	for _, u := range found {
		if u != nil {
			users = append(users, *u)
		}
	}
	return users, nil
}

func (s *Store) page(q rulestore.Query) (names []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ready {
		return nil, fmt.Errorf("%w: the bucket is still being read", rulestore.ErrUnavailable)
	}
	s.names.Ascend(q.After, func(name, plan string) bool {
		if name == q.After || rules.IsAddress(name) != q.Addresses || q.Plan != "" && plan != q.Plan {
			return true
		}
		names = append(names, name)
		return len(names) < q.Limit
	})
	return names, nil
}

// Create implements rulestore.Store.
func (s *Store) Create(ctx context.Context, u rules.User) (rules.User, error) {
	_, seq, err := s.get(ctx, rules.UserKey(u.Name))
	if err == nil {
		return rules.User{}, fmt.Errorf("%w: %s", rulestore.ErrExists, u.Name)
	} else if !errors.Is(err, rulestore.ErrNotFound) {
		return rules.User{}, err
	}
	u.Created = rulestore.Now()
	u.Updated = u.Created
	err = s.write(ctx, &u, nil, seq)
	if errors.Is(err, bus.ErrConflict) {
		err = fmt.Errorf("%w: %s", rulestore.ErrExists, u.Name)
	}
	return u, err
}

// Update implements rulestore.Store.
func (s *Store) Update(ctx context.Context, name string, change func(*rules.User) error) (rules.User, error) {
	for range tries {
		r, seq, err := s.get(ctx, rules.UserKey(name))
		if err != nil {
			return rules.User{}, err
		}
		u := *r.User
		if err := change(&u); err != nil {
			return rules.User{}, err
		}
		u.Updated = rulestore.Now()
		err = s.write(ctx, &u, r.User.Keys, seq)
		if !errors.Is(err, bus.ErrConflict) {
			return u, err
		}
	}
	return rules.User{}, fmt.Errorf("%w: others keep changing %s", rulestore.ErrUnavailable, name)
}

// write stores u, whose record is at seq and had these keys. A key points to its user before the user
// lists it, and as long as it does.
func (s *Store) write(ctx context.Context, u *rules.User, had []rules.Key, seq uint64) error {
	data, err := rules.EncodeUser(*u)
	if err != nil {
		return err
	}
	for _, k := range without(u.Keys, had) {
		if err := s.claim(ctx, k.Hash, u.Name); err != nil {
			return err
		}
	}
	stored, err := s.put(ctx, rules.UserKey(u.Name), data, seq)
	if err != nil {
		return err
	}
	s.release(ctx, without(had, u.Keys), u.Name)
	s.await(ctx, stored)
	return nil
}

// claim makes a key point to a user, unless another one lists it.
func (s *Store) claim(ctx context.Context, hash, name string) error {
	data, err := rules.EncodeOwner(name)
	if err != nil {
		return err
	}
	for range tries {
		r, seq, err := s.get(ctx, rules.HashKey(hash))
		switch {
		case err == nil && r.Owner == name:
			return nil
		case err == nil:
			u, err := s.User(ctx, r.Owner)
			if err == nil && u.HasKey(hash, time.Time{}) {
				return fmt.Errorf("%w: the key is somebody else's", rulestore.ErrExists)
			} else if err != nil && !errors.Is(err, rulestore.ErrNotFound) {
				return err
			}
		case !errors.Is(err, rulestore.ErrNotFound):
			return err
		}
		if _, err = s.put(ctx, rules.HashKey(hash), data, seq); !errors.Is(err, bus.ErrConflict) {
			return err
		}
	}
	return fmt.Errorf("%w: others keep claiming the key", rulestore.ErrUnavailable)
}

// release ends the pointers of keys to a user that lists them no more. One that stays is harmless.
func (s *Store) release(ctx context.Context, keys []rules.Key, name string) {
	for _, k := range keys {
		r, seq, err := s.get(ctx, rules.HashKey(k.Hash))
		if err == nil && r.Owner == name {
			_, err = s.put(ctx, rules.HashKey(k.Hash), nil, seq)
		}
		if err != nil && !errors.Is(err, rulestore.ErrNotFound) {
			s.log.Debug().Err(err).Str("user", name).Msg("the pointer of a withdrawn key stays")
		}
	}
}

// without are the keys of a that are not in b.
func without(a, b []rules.Key) []rules.Key {
	return slices.DeleteFunc(slices.Clone(a), func(k rules.Key) bool {
		return slices.ContainsFunc(b, func(o rules.Key) bool { return o.Hash == k.Hash })
	})
}

// Delete implements rulestore.Store.
func (s *Store) Delete(ctx context.Context, name string) error {
	for range tries {
		r, seq, err := s.get(ctx, rules.UserKey(name))
		if err != nil {
			return err
		}
		stored, err := s.put(ctx, rules.UserKey(name), nil, seq)
		if errors.Is(err, bus.ErrConflict) {
			continue
		}
		if err == nil {
			s.release(ctx, r.User.Keys, name)
			s.await(ctx, stored)
		}
		return err
	}
	return fmt.Errorf("%w: others keep changing %s", rulestore.ErrUnavailable, name)
}

// Plans implements rulestore.Store.
func (s *Store) Plans(context.Context) ([]rules.Plan, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ready {
		return nil, fmt.Errorf("%w: the bucket is still being read", rulestore.ErrUnavailable)
	}
	return slices.SortedFunc(maps.Values(s.plans), func(a, b rules.Plan) int { return strings.Compare(a.Name, b.Name) }), nil
}

// PutPlan implements rulestore.Store.
func (s *Store) PutPlan(ctx context.Context, p rules.Plan) error {
	data, err := rules.EncodePlan(p)
	if err != nil {
		return err
	}
	return s.setPlan(ctx, p.Name, data)
}

// DeletePlan implements rulestore.Store. A user that gets the plan at the same moment is left without
// one: its routes' own limits hold.
func (s *Store) DeletePlan(ctx context.Context, name string) error {
	if _, _, err := s.get(ctx, rules.PlanKey(name)); err != nil {
		return err
	}
	users, err := s.page(rulestore.Query{Plan: name, Limit: 1})
	if err != nil {
		return err
	}
	if len(users) > 0 {
		return fmt.Errorf("%w: %s has plan %s", rulestore.ErrInUse, users[0], name)
	}
	return s.setPlan(ctx, name, nil)
}

func (s *Store) setPlan(ctx context.Context, name string, data []byte) error {
	for range tries {
		_, seq, err := s.get(ctx, rules.PlanKey(name))
		if err != nil && !errors.Is(err, rulestore.ErrNotFound) {
			return err
		}
		stored, err := s.put(ctx, rules.PlanKey(name), data, seq)
		if errors.Is(err, bus.ErrConflict) {
			continue
		}
		if err == nil {
			s.await(ctx, stored)
		}
		return err
	}
	return fmt.Errorf("%w: others keep changing plan %s", rulestore.ErrUnavailable, name)
}

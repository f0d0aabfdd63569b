package deferral

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

const (
	// MaxBody bounds the body of a request that is stored, and of an answer, in bytes.
	MaxBody = 256 << 10
	// callTimeout bounds what a client waits for NATS.
	callTimeout = 2 * time.Second
	// maxCalls bounds the clients that wait for NATS at a time, and so the memory that their requests take.
	maxCalls = 64
)

// What can keep a request from being deferred, or a deferral from being found. With none of them is a request stored.
var (
	// ErrFull: too many requests wait, of this client or in all.
	ErrFull = errors.New("deferral: the queue is full")
	// ErrUnavailable: NATS does not answer. A request may have been stored all the same.
	ErrUnavailable = errors.New("deferral: the queue can't be reached")
	// ErrKeyReused: the idempotency key belongs to another request.
	ErrKeyReused = errors.New("deferral: the idempotency key was used for another request")
	// ErrNotFound: there is no such deferral, or it is another client's, or it has expired.
	ErrNotFound = errors.New("deferral: not found")
	// ErrTooLate: it runs, or has run.
	ErrTooLate = errors.New("deferral: it can't be cancelled any more")
)

// Request is what is stored of a request.
type Request struct {
	ID     string              `json:"id"`
	Method string              `json:"method"`
	Host   string              `json:"host"`
	URI    string              `json:"uri"`
	Header map[string][]string `json:"header"`
	Body   []byte              `json:"body,omitempty"`
	// Peer is the other end of the client's socket.
	Peer string `json:"peer"`
}

// Answer is what a request was answered.
type Answer struct {
	Status int                 `json:"status"`
	Header map[string][]string `json:"header"`
	Body   []byte              `json:"body,omitempty"`
}

// Offer is a request to be deferred.
type Offer struct {
	// Client and Route are who sent it, and by which route.
	Client, Route string
	// Key is the client's idempotency key, "" for none.
	Key     string
	Request Request
}

// Status is what has become of a deferred request.
type Status struct {
	Route  string
	State  events.DeferralState
	Stored time.Time
	// Reason is why it failed.
	Reason string
	// Answer is set when it is done.
	Answer *Answer
}

// Queue is safe for concurrent use.
type Queue struct {
	bus   *bus.Bus
	seal  *sealer
	log   zerolog.Logger
	calls chan struct{}
	line  line
	life  time.Duration
}

// Config makes a Queue.
type Config struct {
	Bus *bus.Bus
	// Secret, the same on every edge, encrypts what is stored; empty: nothing is encrypted.
	Secret []byte
	Log    zerolog.Logger
	// Life is how long after the last sign of life of the edge that runs a request another takes it; 0: thirty seconds.
	Life time.Duration
}

// New makes a queue.
func New(c Config) (*Queue, error) {
	seal, err := newSealer(c.Secret)
	if err != nil {
		return nil, fmt.Errorf("deferral: %w", err)
	}
	if c.Life == 0 {
		c.Life = 30 * time.Second
	}
	return &Queue{bus: c.Bus, seal: seal, log: c.Log, calls: make(chan struct{}, maxCalls), life: c.Life}, nil
}

// call bounds what one client can wait for, and how many do.
func (q *Queue) call(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if !q.bus.Connected() {
		return nil, nil, ErrUnavailable
	}
	select {
	case q.calls <- struct{}{}:
	default:
		return nil, nil, ErrUnavailable
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	return ctx, func() { cancel(); <-q.calls }, nil
}

// Add stores a request and gives its id. When it returns without an error the request will run.
func (q *Queue) Add(ctx context.Context, o Offer) (string, error) {
	ctx, release, err := q.call(ctx)
	if err != nil {
		return "", err
	}
	defer release()
	d := events.Deferral{
		ID: rand.Text(), Client: o.Client, Route: o.Route, Time: time.Now().UnixMicro(), State: events.DeferralQueued,
	}
	if o.Key != "" {
		d.ID, d.Once, d.Digest = keyedID(o), true, digest(o.Request)
		switch known, _, err := q.load(ctx, d.ID); {
		case err == nil:
			return again(known, d)
		case !errors.Is(err, ErrNotFound):
			return "", err
		}
	}
	request, sealed, err := q.seal.seal(o.Request, "request "+d.ID)
	if err != nil {
		return "", fmt.Errorf("deferral: %w", err)
	}
	data, err := events.Encode(events.Deferred{ID: d.ID, Client: d.Client, Request: request, Sealed: sealed})
	if err != nil {
		return "", fmt.Errorf("deferral: %w", err)
	}
	// The request goes first: one without a state is dropped, a state without its request would promise what nobody runs.
	if d.Seq, err = q.bus.Publish(ctx, events.SubjectDeferred(d.Client), data); err != nil {
		return "", classify(err)
	}
	switch _, err := q.save(ctx, d, 0); {
	case err == nil:
		return d.ID, nil
	case errors.Is(err, bus.ErrConflict) && d.Once: // the same key came twice at once
		known, _, err := q.load(ctx, d.ID)
		if err != nil {
			return "", err
		}
		return again(known, d)
	default:
		return "", classify(err)
	}
}

// again is the answer to a key that was used before.
func again(known, d events.Deferral) (string, error) {
	if known.Client != d.Client || string(known.Digest) != string(d.Digest) {
		return "", ErrKeyReused
	}
	return known.ID, nil
}

// keyedID is the same for the same key of a client on a route. It is no secret: its owner alone is answered.
func keyedID(o Offer) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %s%d %s%s", len(o.Client), o.Client, len(o.Route), o.Route, o.Key))
	return base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:16])
}

// digest tells requests apart by what they ask.
func digest(r Request) []byte {
	data, _ := json.Marshal([]any{r.Method, r.Host, r.URI, r.Body}) // strings and bytes always encode
	sum := sha256.Sum256(data)
	return sum[:]
}

// Get is what has become of a client's request.
func (q *Queue) Get(ctx context.Context, client, id string) (Status, error) {
	ctx, release, err := q.call(ctx)
	if err != nil {
		return Status{}, err
	}
	defer release()
	d, _, err := q.owned(ctx, client, id)
	if err != nil {
		return Status{}, err
	}
	s := Status{Route: d.Route, State: d.State, Stored: time.UnixMicro(d.Time), Reason: d.Reason}
	if d.State == events.DeferralDone {
		s.Answer = new(Answer)
		if err := q.seal.open(d.Result, d.Sealed, "answer "+d.ID, s.Answer); err != nil {
			return Status{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
	}
	return s, nil
}

// Cancel takes a client's request back; with ErrTooLate it runs or is over.
func (q *Queue) Cancel(ctx context.Context, client, id string) error {
	ctx, release, err := q.call(ctx)
	if err != nil {
		return err
	}
	defer release()
	for {
		d, at, err := q.owned(ctx, client, id)
		switch {
		case err != nil:
			return err
		case d.State == events.DeferralCancelled:
			return nil
		case d.State != events.DeferralQueued:
			return ErrTooLate
		}
		d.State = events.DeferralCancelled
		switch _, err := q.save(ctx, d, at); {
		case err == nil:
			return nil
		case !errors.Is(err, bus.ErrConflict): // else an edge took it up meanwhile
			return classify(err)
		}
	}
}

var idForm = regexp.MustCompile(`^[A-Z2-7]{26}$`)

// owned loads a deferral for its owner.
func (q *Queue) owned(ctx context.Context, client, id string) (events.Deferral, uint64, error) {
	if !idForm.MatchString(id) {
		return events.Deferral{}, 0, ErrNotFound
	}
	d, at, err := q.load(ctx, id)
	if err == nil && d.Client != client {
		return events.Deferral{}, 0, ErrNotFound
	}
	return d, at, err
}

// load gives a deferral and the sequence of its state.
func (q *Queue) load(ctx context.Context, id string) (events.Deferral, uint64, error) {
	m, err := q.bus.Last(ctx, events.StreamDeferrals, events.SubjectDeferral(id))
	if err != nil {
		return events.Deferral{}, 0, classify(err)
	}
	d, err := events.Decode[events.Deferral](m.Data)
	if err == nil && d.ID != id {
		err = fmt.Errorf("it tells of %q", d.ID)
	}
	if err != nil {
		return events.Deferral{}, 0, fmt.Errorf("%w: state of %s: %w", ErrUnavailable, id, err)
	}
	return d, m.Seq, nil
}

// save replaces the state of sequence at, 0 for none; bus.ErrConflict: it is not the last any more.
func (q *Queue) save(ctx context.Context, d events.Deferral, at uint64) (uint64, error) {
	data, err := events.Encode(d)
	if err != nil {
		return 0, err
	}
	return q.bus.Publish(ctx, events.SubjectDeferral(d.ID), data, bus.WithLastSubjectSeq(at))
}

func classify(err error) error {
	switch {
	case errors.Is(err, bus.ErrFull), errors.Is(err, bus.ErrTooLarge):
		return fmt.Errorf("%w: %w", ErrFull, err)
	case errors.Is(err, bus.ErrNotFound):
		return ErrNotFound
	default:
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
}

package deferral_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/deferral"
)

// life is how long a lost edge's request waits here.
const life = 2 * time.Second

func newQueue(t *testing.T, b *bus.Bus, secret string) *deferral.Queue {
	t.Helper()
	q, err := deferral.New(deferral.Config{Bus: b, Secret: []byte(secret), Life: life, Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.ErrorLevel)})
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// runner is an edge's handler: it runs a request when the test lets it.
type runner struct {
	mu  sync.Mutex
	ran []string // URIs, in order
	// wait is what Foresee answers, run what Run does; both may be nil.
	wait func(r deferral.Request) (deferral.Prospect, error)
	run  func(ctx context.Context, r deferral.Request) (deferral.Answer, time.Duration, error)
}

func (r *runner) Foresee(_ context.Context, _ string, req deferral.Request) (deferral.Prospect, error) {
	if r.wait == nil {
		return deferral.Prospect{}, nil
	}
	return r.wait(req)
}

func (r *runner) Run(ctx context.Context, client string, req deferral.Request) (deferral.Answer, time.Duration, error) {
	r.mu.Lock()
	r.ran = append(r.ran, req.URI)
	r.mu.Unlock()
	if r.run == nil {
		return deferral.Answer{Status: 200, Header: map[string][]string{"X-Client": {client}}, Body: append([]byte("to "), req.Body...)}, 0, nil
	}
	return r.run(ctx, req)
}

func (r *runner) times(uri string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, u := range r.ran {
		if u == uri {
			n++
		}
	}
	return n
}

// work runs what is in the queue until the test ends or stop is called.
func work(t *testing.T, q *deferral.Queue, r *runner) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() {
		defer close(over)
		q.Run(ctx, r, 100*time.Millisecond)
	}()
	stop = func() { cancel(); <-over }
	t.Cleanup(stop)
	return stop
}

func offer(client, uri string) deferral.Offer {
	return deferral.Offer{Client: client, Route: "api", Request: deferral.Request{
		ID: "r", Method: "PUT", Host: "h", URI: uri, Header: map[string][]string{"Authorization": {"Bearer hush"}}, Body: []byte(uri), Peer: "192.0.2.1:1",
	}}
}

func add(t *testing.T, q *deferral.Queue, o deferral.Offer) string {
	t.Helper()
	id, err := q.Add(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// state is what has become of a request, "" where NATS does not say.
func state(t *testing.T, q *deferral.Queue, client, id string) events.DeferralState {
	t.Helper()
	s, err := q.Get(t.Context(), client, id)
	if err != nil && !errors.Is(err, deferral.ErrUnavailable) {
		t.Fatal(err)
	}
	return s.State
}

func awaitState(t *testing.T, q *deferral.Queue, client, id string, want events.DeferralState) deferral.Status {
	t.Helper()
	bustest.Await(t, "state "+string(want), func() bool { return state(t, q, client, id) == want })
	s, err := q.Get(t.Context(), client, id)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A stored request runs on any edge, once, and its answer is its owner's alone.
func TestRunsAndAnswers(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	q := newQueue(t, b, "")
	id := add(t, q, offer("user:a", "/x"))
	if got := state(t, q, "user:a", id); got != events.DeferralQueued {
		t.Errorf("before any edge runs it: %s", got)
	}
	other := newQueue(t, s.Bus(t), "") // another edge
	r := &runner{}
	work(t, other, r)
	got := awaitState(t, q, "user:a", id, events.DeferralDone)
	if got.Answer.Status != 200 || string(got.Answer.Body) != "to /x" || got.Answer.Header["X-Client"][0] != "user:a" || got.Route != "api" || time.Since(got.Stored) > time.Hour {
		t.Errorf("%+v", got)
	}
	for _, try := range [][2]string{{"user:b", id}, {"user:a", "AAAAAAAAAAAAAAAAAAAAAAAAAA"}, {"user:a", "../x"}, {"user:a", "*"}, {"user:a", ""}} {
		if _, err := q.Get(t.Context(), try[0], try[1]); !errors.Is(err, deferral.ErrNotFound) {
			t.Errorf("%v: %v", try, err)
		}
		if err := q.Cancel(t.Context(), try[0], try[1]); !errors.Is(err, deferral.ErrNotFound) {
			t.Errorf("cancel %v: %v", try, err)
		}
	}
	if err := q.Cancel(t.Context(), "user:a", id); !errors.Is(err, deferral.ErrTooLate) {
		t.Errorf("cancel what is done: %v", err)
	}
	if n := r.times("/x"); n != 1 {
		t.Errorf("it ran %d times", n)
	}
}

// A request waits until its limits have room, then pays; those of one client run in their order.
func TestWaitsItsTurn(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	q := newQueue(t, b, "")
	var mu sync.Mutex
	tokens := 0
	r := &runner{
		wait: func(deferral.Request) (deferral.Prospect, error) {
			mu.Lock()
			defer mu.Unlock()
			if tokens > 0 {
				return deferral.Prospect{Each: 20 * time.Millisecond}, nil
			}
			return deferral.Prospect{Wait: 20 * time.Millisecond, Each: 20 * time.Millisecond}, nil
		},
	}
	r.run = func(_ context.Context, req deferral.Request) (deferral.Answer, time.Duration, error) {
		mu.Lock()
		defer mu.Unlock()
		if tokens == 0 { // somebody else was faster
			return deferral.Answer{}, 10 * time.Millisecond, nil
		}
		tokens--
		return deferral.Answer{Status: 200}, 0, nil
	}
	var ids, uris []string
	for i := range 10 {
		uris = append(uris, fmt.Sprintf("/%d", i))
		ids = append(ids, add(t, q, offer("user:a", uris[i])))
	}
	work(t, q, r)
	for i, id := range ids {
		mu.Lock()
		tokens = 1
		mu.Unlock()
		awaitState(t, q, "user:a", id, events.DeferralDone)
		for _, behind := range ids[i+1:] {
			if got := state(t, q, "user:a", behind); got == events.DeferralDone {
				t.Fatalf("%d was overtaken", i)
			}
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if ran := slices.Compact(r.ran); !slices.Equal(ran, uris) {
		t.Errorf("ran %q", r.ran)
	}
}

// One client's line holds up nobody else.
func TestOtherClientsPass(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	q := newQueue(t, b, "")
	for i := range events.MaxDeferredPerClient {
		add(t, q, offer("user:a", fmt.Sprintf("/a/%d", i)))
	}
	if _, err := q.Add(t.Context(), offer("user:a", "/one/more")); !errors.Is(err, deferral.ErrFull) {
		t.Errorf("more than a client may have: %v", err)
	}
	id := add(t, q, offer("user:b", "/b"))
	r := &runner{wait: func(r deferral.Request) (deferral.Prospect, error) {
		if strings.HasPrefix(r.URI, "/a/") {
			return deferral.Prospect{Wait: time.Minute, Each: time.Second}, nil
		}
		return deferral.Prospect{}, nil
	}}
	work(t, q, r)
	awaitState(t, q, "user:b", id, events.DeferralDone)
}

// What is cancelled before its turn never runs; a cancellation that comes too late says so.
func TestCancel(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	q := newQueue(t, b, "")
	began, finish := make(chan struct{}), make(chan struct{})
	r := &runner{run: func(_ context.Context, req deferral.Request) (deferral.Answer, time.Duration, error) {
		if req.URI == "/long" {
			close(began)
			<-finish
		}
		return deferral.Answer{Status: 200}, 0, nil
	}}
	cancelled := add(t, q, offer("user:a", "/cancelled"))
	if err := q.Cancel(t.Context(), "user:a", cancelled); err != nil {
		t.Fatal(err)
	}
	if err := q.Cancel(t.Context(), "user:a", cancelled); err != nil {
		t.Errorf("again: %v", err)
	}
	long := add(t, q, offer("user:a", "/long"))
	last := add(t, q, offer("user:a", "/last"))
	work(t, q, r)
	<-began
	if err := q.Cancel(t.Context(), "user:a", long); !errors.Is(err, deferral.ErrTooLate) {
		t.Errorf("while it runs: %v", err)
	}
	close(finish)
	awaitState(t, q, "user:a", last, events.DeferralDone)
	awaitState(t, q, "user:a", long, events.DeferralDone)
	if got := state(t, q, "user:a", cancelled); got != events.DeferralCancelled || r.times("/cancelled") != 0 {
		t.Errorf("%s, ran %d times", got, r.times("/cancelled"))
	}
}

// When the edge that runs a request dies, another runs it again: at least once. With an idempotency key it
// may have run, so nobody does: at most once.
func TestEdgeKilledWhileItRuns(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t, bustest.Listen())
	s.Provisioned(t)
	gate := bustest.NewProxy(t, s.URL())
	lost := s.Bus(t, func(c *bus.Config) { c.InProcess, c.URL = nil, "nats://"+gate.Addr() })
	bustest.Await(t, "connection", lost.Connected)
	q := newQueue(t, s.Bus(t), "")
	bustest.Await(t, "connection", func() bool { _, err := q.Get(t.Context(), "c", "x"); return !errors.Is(err, deferral.ErrUnavailable) })

	free, once := offer("user:a", "/free"), offer("user:b", "/once")
	once.Key = "k"
	ids := []string{add(t, q, free), add(t, q, once)}
	var began sync.WaitGroup
	began.Add(2)
	hang := make(chan struct{})
	dead := &runner{run: func(context.Context, deferral.Request) (deferral.Answer, time.Duration, error) {
		began.Done()
		<-hang
		return deferral.Answer{Status: 200, Body: []byte("late")}, 0, nil
	}}
	stop := work(t, newQueue(t, lost, ""), dead)
	began.Wait()
	gate.Stall() // to the others it is dead: not a word comes from it
	alive := &runner{}
	work(t, q, alive)
	if got := awaitState(t, q, "user:a", ids[0], events.DeferralDone); string(got.Answer.Body) != "to /free" {
		t.Errorf("%+v", got)
	}
	if got := awaitState(t, q, "user:b", ids[1], events.DeferralFailed); !strings.Contains(got.Reason, "may have run") {
		t.Errorf("%+v", got)
	}
	if alive.times("/free") != 1 || alive.times("/once") != 0 {
		t.Errorf("ran %q", alive.ran)
	}
	// It was not dead. Its answer to the request that may have run counts; the other has one already.
	gate.Heal()
	close(hang)
	if got := awaitState(t, q, "user:b", ids[1], events.DeferralDone); string(got.Answer.Body) != "late" {
		t.Errorf("%+v", got)
	}
	stop()
	if got := awaitState(t, q, "user:a", ids[0], events.DeferralDone); string(got.Answer.Body) != "to /free" {
		t.Errorf("%+v", got)
	}
}

// An edge that stops gives back what it runs, unless that may have run and must not twice.
func TestEdgeStopped(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	q := newQueue(t, b, "")
	free, once := offer("user:a", "/free"), offer("user:b", "/once")
	once.Key = "k"
	ids := []string{add(t, q, free), add(t, q, once)}
	var began sync.WaitGroup
	began.Add(2)
	stop := work(t, q, &runner{run: func(ctx context.Context, _ deferral.Request) (deferral.Answer, time.Duration, error) {
		began.Done()
		<-ctx.Done()
		return deferral.Answer{}, 0, deferral.ErrInterrupted
	}})
	began.Wait()
	stop()
	if got := state(t, q, "user:a", ids[0]); got != events.DeferralQueued {
		t.Errorf("%s", got)
	}
	next := &runner{}
	work(t, q, next)
	awaitState(t, q, "user:a", ids[0], events.DeferralDone)
	awaitState(t, q, "user:b", ids[1], events.DeferralFailed)
	if next.times("/once") != 0 {
		t.Error("what must run at most once ran again")
	}
}

// The same idempotency key is the same request, for the client and the route it belongs to.
func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	q := newQueue(t, b, "")
	keyed := func(client, route, key, uri string) deferral.Offer {
		o := offer(client, uri)
		o.Route, o.Key = route, key
		return o
	}
	first := add(t, q, keyed("user:a", "api", "k", "/x"))
	if again := add(t, q, keyed("user:a", "api", "k", "/x")); again != first {
		t.Errorf("the same request: %s and %s", first, again)
	}
	if _, err := q.Add(t.Context(), keyed("user:a", "api", "k", "/y")); !errors.Is(err, deferral.ErrKeyReused) {
		t.Errorf("another request: %v", err)
	}
	for _, o := range []deferral.Offer{keyed("user:b", "api", "k", "/x"), keyed("user:a", "other", "k", "/x"), keyed("user:a", "api", "k2", "/x"), keyed("user:a", "api", "", "/x")} {
		if id := add(t, q, o); id == first {
			t.Errorf("%+v is taken for another's", o)
		}
	}
	// Twenty at once are one.
	var wg sync.WaitGroup
	ids := make([]string, 20)
	for i := range ids {
		wg.Go(func() {
			id, err := q.Add(t.Context(), keyed("user:c", "api", "k", "/twenty"))
			if err != nil {
				t.Error(err)
			}
			ids[i] = id
		})
	}
	wg.Wait()
	if slices.Sort(ids); ids[0] != ids[19] {
		t.Errorf("%q", ids)
	}
	r := &runner{}
	work(t, q, r)
	awaitState(t, q, "user:c", ids[0], events.DeferralDone)
	bustest.Await(t, "an empty queue", func() bool {
		state, err := b.Stream(t.Context(), events.StreamDeferred)
		return err == nil && state.Msgs == 0
	})
	if n := r.times("/twenty"); n != 1 {
		t.Errorf("it ran %d times", n)
	}
	if n := r.times("/x"); n != 5 { // first, and four that are others
		t.Errorf("/x ran %d times", n)
	}
}

// A promise outlives the restart of NATS, and of every edge.
func TestNATSRestarted(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	q := newQueue(t, b, "")
	id := add(t, q, offer("user:a", "/x"))
	s.Stop()
	began := time.Now()
	if _, err := q.Add(t.Context(), offer("user:a", "/y")); !errors.Is(err, deferral.ErrUnavailable) {
		t.Errorf("without NATS: %v", err)
	}
	if d := time.Since(began); d > 30*time.Second {
		t.Errorf("the refusal took %v", d)
	}
	s.Restart()
	bustest.Await(t, "connection", b.Connected)
	fresh := newQueue(t, s.Bus(t), "")
	work(t, fresh, &runner{})
	awaitState(t, q, "user:a", id, events.DeferralDone)
}

// A NATS outage while a request runs loses no answer.
func TestNATSRestartedWhileItRuns(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	q := newQueue(t, b, "")
	o := offer("user:a", "/x")
	o.Key = "k"
	id := add(t, q, o)
	r := &runner{run: func(context.Context, deferral.Request) (deferral.Answer, time.Duration, error) {
		s.Restart()
		return deferral.Answer{Status: 201}, 0, nil
	}}
	work(t, q, r)
	if got := awaitState(t, q, "user:a", id, events.DeferralDone); got.Answer.Status != 201 || r.times("/x") != 1 {
		t.Errorf("%+v, ran %d times", got, r.times("/x"))
	}
}

// What never can run fails and says why; so does an answer that can't be kept.
func TestFails(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	q := newQueue(t, b, "")
	ids := map[string]string{}
	for _, uri := range []string{"/forgotten", "/endless", "/broken", "/huge"} {
		ids[uri] = add(t, q, offer("user:"+uri, uri))
	}
	work(t, q, &runner{
		wait: func(r deferral.Request) (deferral.Prospect, error) {
			switch r.URI {
			case "/forgotten":
				return deferral.Prospect{}, errors.New("not known any more")
			case "/endless":
				return deferral.Prospect{Wait: 2 * events.DeferralLife}, nil
			}
			return deferral.Prospect{}, nil
		},
		run: func(_ context.Context, r deferral.Request) (deferral.Answer, time.Duration, error) {
			if r.URI == "/huge" {
				return deferral.Answer{Status: 200, Body: make([]byte, 4<<20)}, 0, nil
			}
			return deferral.Answer{}, 0, errors.New("broke off")
		},
	})
	for uri, says := range map[string]string{"/forgotten": "not known", "/endless": "in time", "/broken": "broke off", "/huge": "could not be kept"} {
		if s := awaitState(t, q, "user:"+uri, ids[uri], events.DeferralFailed); !strings.Contains(s.Reason, says) {
			t.Errorf("%s: %q", uri, s.Reason)
		}
	}
}

// With a secret, what lies in NATS can't be read; another secret neither reads nor runs it.
func TestSealed(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	q := newQueue(t, b, "secret")
	id := add(t, q, offer("user:a", "/x"))
	wrong := &runner{}
	stop := work(t, newQueue(t, b, "other"), wrong)
	m, err := b.Last(t.Context(), events.StreamDeferred, events.SubjectDeferred("user:a"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := events.Decode[events.Deferred](m.Data)
	if err != nil || !d.Sealed || strings.Contains(string(d.Request), "hush") {
		t.Errorf("%+v, %v", d, err)
	}
	time.Sleep(50 * time.Millisecond) // whatever it does, it must not run it
	stop()
	r := &runner{}
	work(t, q, r)
	s := awaitState(t, q, "user:a", id, events.DeferralDone)
	if string(s.Answer.Body) != "to /x" || len(wrong.ran) > 0 {
		t.Errorf("%+v; run by who can't read it: %q", s, wrong.ran)
	}
	m, err = b.Last(t.Context(), events.StreamDeferrals, events.SubjectDeferral(id))
	if err != nil {
		t.Fatal(err)
	}
	if f, err := events.Decode[events.Deferral](m.Data); err != nil || !f.Sealed || strings.Contains(string(f.Result), "/x") {
		t.Errorf("%+v, %v", f, err)
	}
	if _, err := newQueue(t, b, "other").Get(t.Context(), "user:a", id); !errors.Is(err, deferral.ErrUnavailable) {
		t.Errorf("the answer is read without the secret: %v", err)
	}
}

// A message without a state promised nothing: it is dropped, not run. One that can't be read holds up nobody.
func TestOrphansAreNotRun(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	q := newQueue(t, b, "")
	data, err := events.Encode(events.Deferred{ID: "AAAAAAAAAAAAAAAAAAAAAAAAAA", Client: "user:a", Request: []byte(`{"uri":"/orphan"}`)})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range [][]byte{data, []byte("{")} {
		if _, err := b.Publish(t.Context(), events.SubjectDeferred("user:a"), d); err != nil {
			t.Fatal(err)
		}
	}
	id := add(t, q, offer("user:a", "/x"))
	r := &runner{}
	work(t, q, r)
	awaitState(t, q, "user:a", id, events.DeferralDone)
	if r.times("/orphan") != 0 {
		t.Error("an orphan ran")
	}
}

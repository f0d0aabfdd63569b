package bus_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// seen are the jobs that workers were given, by the text of their message.
type seen struct {
	mu   sync.Mutex
	jobs []string
}

func (s *seen) add(j bus.Job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.jobs = append(s.jobs, string(j.Data))
}

func (s *seen) count(job string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, j := range s.jobs {
		if j == job {
			n++
		}
	}
	return n
}

func (s *seen) sorted() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(slices.Values(s.jobs))
}

// work runs fn for the jobs of AEGIS_DEFERRED until the test ends or stop is called.
func work(t *testing.T, b *bus.Bus, life time.Duration, fn func(bus.Job)) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() {
		defer close(over)
		b.Work(ctx, bus.WorkConfig{Stream: events.StreamDeferred, Consumer: "test", AtOnce: 4, Life: life}, func(j bus.Job) func() {
			return func() { fn(j) }
		})
	}()
	stop = func() { cancel(); <-over }
	t.Cleanup(stop)
	return stop
}

func publishJob(t *testing.T, b *bus.Bus, client, job string) {
	t.Helper()
	if _, err := b.Publish(t.Context(), events.SubjectDeferred(client), []byte(job)); err != nil {
		t.Fatal(err)
	}
}

func queued(t *testing.T, b *bus.Bus) uint64 {
	t.Helper()
	state, err := b.Stream(t.Context(), events.StreamDeferred)
	if err != nil {
		t.Fatal(err)
	}
	return state.Msgs
}

// Workers share the jobs of a queue; each job is done once, also over a restart of the server.
func TestWorkIsShared(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	var done seen
	finish := func(j bus.Job) {
		done.add(j)
		if err := j.Done(); err != nil {
			t.Error(err)
		}
	}
	work(t, b, time.Minute, finish)
	work(t, s.Bus(t), time.Minute, finish)
	var want []string
	for i := range 40 {
		job := string(rune('A' + i))
		want = append(want, job)
		publishJob(t, b, "c", job)
	}
	bustest.Await(t, "all jobs", func() bool { return len(done.sorted()) >= len(want) && queued(t, b) == 0 })
	s.Restart()
	bustest.Await(t, "connection", b.Connected)
	publishJob(t, b, "c", "z")
	bustest.Await(t, "a job after the restart", func() bool { return done.count("z") == 1 })
	if diff := slices.Compare(done.sorted(), append(want, "z")); diff != 0 {
		t.Errorf("done: %q", done.sorted())
	}
}

// A job that is put off comes again, not before its time, and holds up no other; one that falls silent comes again too.
func TestWorkComesAgain(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	var got seen
	var mu sync.Mutex
	first := map[string]time.Time{}
	var early []time.Duration
	work(t, b, 3*time.Second, func(j bus.Job) {
		got.add(j)
		mu.Lock()
		began, again := first[string(j.Data)]
		if !again {
			first[string(j.Data)] = time.Now()
		}
		mu.Unlock()
		switch string(j.Data) {
		case "later":
			if !again {
				j.Later(300 * time.Millisecond)
				return
			}
			if d := time.Since(began); d < 290*time.Millisecond {
				early = append(early, d)
			}
		case "silent":
			if !again {
				return // its worker died
			}
		case "long":
			for range 12 { // longer than its life, with a word now and then
				time.Sleep(300 * time.Millisecond)
				j.Busy()
			}
		}
		j.Done()
	})
	for _, job := range []string{"long", "later", "silent", "other"} {
		publishJob(t, b, "c", job)
	}
	bustest.Await(t, "an empty queue", func() bool { return queued(t, b) == 0 })
	if got.count("other") != 1 || got.count("later") != 2 || got.count("silent") != 2 || got.count("long") != 1 || len(early) > 0 {
		t.Errorf("%q; too early: %v", got.sorted(), early)
	}
}

// The queue takes so many jobs of one client, and of the others still.
func TestQueueIsBoundedPerClient(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	for range events.MaxDeferredPerClient {
		publishJob(t, b, "c", "x")
	}
	if _, err := b.Publish(t.Context(), events.SubjectDeferred("c"), []byte("x")); !errors.Is(err, bus.ErrFull) {
		t.Errorf("one more: %v, want ErrFull", err)
	}
	publishJob(t, b, "d", "x")
	if n := queued(t, b); n != events.MaxDeferredPerClient+1 {
		t.Errorf("%d jobs are queued", n)
	}
}

// What stands in the queue is kept over a restart.
func TestWorkOutlivesARestart(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	publishJob(t, b, "c", "a")
	var got seen
	stop := work(t, b, time.Minute, func(j bus.Job) { got.add(j); j.Later(time.Hour) })
	bustest.Await(t, "the job", func() bool { return got.count("a") == 1 })
	stop()
	publishJob(t, b, "c", "b")
	s.Restart()
	bustest.Await(t, "connection", b.Connected)
	work(t, b, time.Minute, func(j bus.Job) { got.add(j); j.Done() })
	// The first waits for its hour, unless the restart came before the server had heard of that: then it has run again.
	bustest.Await(t, "the other job", func() bool { return got.count("b") == 1 && int(queued(t, b)) == 2-got.count("a") })
}

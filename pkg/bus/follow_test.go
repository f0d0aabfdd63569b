package bus_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
)

// follow runs Follow in the background; end gives its error.
func follow(t *testing.T, b *bus.Bus, from bus.Start, fn func(bus.Message) error, opts ...bus.FollowOption) (end <-chan error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		done <- b.Follow(ctx, "TINY", from, fn, opts...)
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return done
}

func outcome(t *testing.T, end <-chan error) error {
	t.Helper()
	select {
	case err := <-end:
		return err
	case <-time.After(30 * time.Second):
		t.Fatal("Follow did not return")
		return nil
	}
}

func TestFollowStarts(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b, tiny("tiny.*"))
	for i := 1; i <= 10; i++ {
		publish(t, b, fmt.Sprintf("tiny.%d", i%3), i, i)
	}
	ninth := stored(t, b, "TINY")[8].Time
	if err := b.Purge(t.Context(), "TINY", 3); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name string
		from bus.Start
		opts []bus.FollowOption
		want []string
		in   inbox
	}{
		{name: "all", from: bus.All(), want: []string{"3", "4", "5", "6", "7", "8", "9", "10"}},
		{name: "from a sequence", from: bus.FromSeq(8), want: []string{"8", "9", "10"}},
		{name: "from zero", from: bus.FromSeq(0), want: []string{"3", "4", "5", "6", "7", "8", "9", "10"}},
		{name: "from a purged sequence", from: bus.FromSeq(2), want: []string{"3", "4", "5", "6", "7", "8", "9", "10"}},
		{name: "from the end", from: bus.FromSeq(11)},
		{name: "from a time", from: bus.FromTime(ninth), want: []string{"9", "10"}},
		{name: "last per subject", from: bus.LastPerSubject(), want: []string{"8", "9", "10"}},
		{name: "one subject", from: bus.All(), opts: []bus.FollowOption{bus.Subjects("tiny.1")}, want: []string{"4", "7", "10"}},
		{name: "last of two subjects", from: bus.LastPerSubject(), opts: []bus.FollowOption{bus.Subjects("tiny.1", "tiny.2")}, want: []string{"8", "10"}},
	}
	for i := range cases {
		c := &cases[i]
		follow(t, b, c.from, c.in.add, c.opts...)
		bustest.Await(t, c.name, func() bool { return c.in.len() >= len(c.want) })
	}
	// Every one of them goes on with what comes.
	publish(t, b, "tiny.1", 11, 11)
	for i := range cases {
		c := &cases[i]
		want := append(c.want, "11")
		bustest.Await(t, c.name, func() bool { return c.in.len() >= len(want) })
		if got := c.in.texts(); !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", c.name, got, want)
		}
		for _, m := range c.in.got {
			if m.Time.IsZero() || fmt.Sprint(m.Seq) != string(m.Data) {
				t.Errorf("%s: %+v", c.name, m)
			}
		}
	}
}

// TestFollowOverRestarts publishes while the server goes away and comes back,
// and wants every stored message once, in order.
func TestFollowOverRestarts(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	reader, writer := s.Bus(t), s.Bus(t)
	provision(t, writer, tiny("tiny"))
	var seqs []uint64
	var last atomic.Uint64
	end := follow(t, reader, bus.All(), func(m bus.Message) error {
		seqs = append(seqs, m.Seq)
		last.Store(m.Seq)
		return nil
	})
	stop := make(chan struct{})
	written := make(chan struct{})
	go func() {
		defer close(written)
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = writer.Publish(t.Context(), "tiny", nil) // fails while the server is away
			}
		}
	}()
	for round := range uint64(4) {
		before := last.Load()
		bustest.Await(t, fmt.Sprint("progress in round ", round), func() bool { return last.Load() > before+50 })
		s.Restart()
	}
	close(stop)
	<-written
	bustest.Await(t, "connection", writer.Connected)
	state, err := writer.Stream(t.Context(), "TINY")
	if err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "the last message", func() bool { return last.Load() == state.Last })
	select {
	case err := <-end:
		t.Fatal(err)
	default:
	}
	for i, seq := range seqs {
		if seq != uint64(i+1) {
			t.Fatalf("message %d has sequence %d", i+1, seq)
		}
	}
}

// TestFollowOverCuts breaks the reader's connection only: the server still
// holds its consumer, and what was on the wire is lost.
func TestFollowOverCuts(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t, bustest.Listen())
	writer := s.Bus(t)
	provision(t, writer, tiny("tiny"))
	proxy := bustest.NewProxy(t, s.URL())
	reader, err := bus.Connect(t.Context(), bus.Config{Name: "reader", URL: proxy.Addr()}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(reader.Close)
	var in inbox
	follow(t, reader, bus.All(), in.add)
	n := 0
	for range 5 {
		publish(t, writer, "tiny", n+1, n+100)
		bustest.Await(t, "progress", func() bool { return in.len() > n })
		proxy.Mute() // what is sent now is lost on the way
		publish(t, writer, "tiny", n+101, n+200)
		proxy.Heal()
		n += 200
	}
	bustest.Await(t, "all messages", func() bool { return in.len() >= n })
	counted(t, in.texts(), 1, n)
}

// TestFollowLosesItsConsumer lets somebody delete the consumer under a reader.
func TestFollowLosesItsConsumer(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, tiny("tiny"))
	stream, err := raw(t, s).Stream(t.Context(), "TINY")
	if err != nil {
		t.Fatal(err)
	}
	var in inbox
	follow(t, b, bus.All(), in.add)
	for round := range 3 {
		publish(t, b, "tiny", 10*round+1, 10*round+10)
		bustest.Await(t, "messages", func() bool { return in.len() == 10*round+10 })
		for name := range stream.ConsumerNames(t.Context()).Name() {
			if err := stream.DeleteConsumer(t.Context(), name); err != nil {
				t.Fatal(err)
			}
		}
	}
	publish(t, b, "tiny", 31, 31)
	bustest.Await(t, "messages", func() bool { return in.len() == 31 })
	counted(t, in.texts(), 1, 31)
}

// TestFollowNoticesAGap lets a thief take messages from the reader's own
// consumer: what does not arrive must be read again, in its place.
func TestFollowNoticesAGap(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, tiny("tiny"))
	stream, err := raw(t, s).Stream(t.Context(), "TINY")
	if err != nil {
		t.Fatal(err)
	}
	var in inbox
	follow(t, b, bus.All(), in.add)
	publish(t, b, "tiny", 1, 1)
	bustest.Await(t, "first message", func() bool { return in.len() == 1 })
	var consumer jetstream.Consumer
	for name := range stream.ConsumerNames(t.Context()).Name() {
		if consumer, err = stream.Consumer(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	loot, err := consumer.Fetch(20, jetstream.FetchMaxWait(10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	publish(t, b, "tiny", 2, 100)
	if _, stolen := <-loot.Messages(); !stolen {
		t.Fatalf("nothing was stolen, so nothing is shown: %v", loot.Error())
	}
	bustest.Await(t, "all messages", func() bool { return in.len() >= 100 })
	counted(t, in.texts(), 1, 100)
}

// TestFollowWithASlowFunction holds the reader up for longer than the bus reads ahead.
func TestFollowWithASlowFunction(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b, tiny("tiny"))
	publish(t, b, "tiny", 1, 500)
	var in inbox
	release := make(chan struct{})
	follow(t, b, bus.All(), func(m bus.Message) error {
		if m.Seq == 70 {
			<-release
		}
		return in.add(m)
	})
	bustest.Await(t, "first messages", func() bool { return in.len() == 69 })
	publish(t, b, "tiny", 501, 1000)
	close(release)
	bustest.Await(t, "all messages", func() bool { return in.len() == 1000 })
	counted(t, in.texts(), 1, 1000)
}

func TestFollowWaitsForTheStream(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	s.Stop()
	b := s.Bus(t)
	var in inbox
	follow(t, b, bus.LastPerSubject(), in.add)
	s.Restart()
	bustest.Await(t, "connection", b.Connected)
	if _, err := b.Stream(t.Context(), "TINY"); !errors.Is(err, bus.ErrNoStream) {
		t.Errorf("got %v, want ErrNoStream", err)
	}
	provision(t, b, tiny("tiny"))
	publish(t, b, "tiny", 1, 1)
	bustest.Await(t, "message", func() bool { return in.len() == 1 })
}

func TestFollowNoticesANewStream(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	js := raw(t, s)
	provision(t, b, tiny("tiny"))
	state, err := b.Stream(t.Context(), "TINY")
	if err != nil {
		t.Fatal(err)
	}
	publish(t, b, "tiny", 1, 5)
	var in inbox
	end := follow(t, b, bus.All(), in.add)
	bustest.Await(t, "messages", func() bool { return in.len() == 5 })

	recreate := func() {
		if err := js.DeleteStream(t.Context(), "TINY"); err != nil {
			t.Fatal(err)
		}
		provision(t, b, tiny("tiny"))
		publish(t, b, "tiny", 1, 10)
	}
	recreate()
	if err := outcome(t, end); !errors.Is(err, bus.ErrStreamReset) {
		t.Errorf("got %v, want ErrStreamReset", err)
	}
	counted(t, in.texts(), 1, 5)

	// Whoever kept the old identity is told at once.
	if err := outcome(t, follow(t, b, bus.FromSeq(6), in.add, bus.OfStream(state.ID))); !errors.Is(err, bus.ErrStreamReset) {
		t.Errorf("got %v, want ErrStreamReset", err)
	}
	// So is one whose position the stream never reached.
	if err := outcome(t, follow(t, b, bus.FromSeq(12), in.add)); !errors.Is(err, bus.ErrStreamReset) {
		t.Errorf("got %v, want ErrStreamReset", err)
	}
	now, err := b.Stream(t.Context(), "TINY")
	if err != nil || now.ID == state.ID {
		t.Fatalf("got %+v, %v: want another identity than %s", now, err, state.ID)
	}
	// A restart is no new stream.
	s.Restart()
	bustest.Await(t, "connection", b.Connected)
	again, err := b.Stream(t.Context(), "TINY")
	if err != nil || again != now {
		t.Errorf("after a restart %+v, %v: want %+v", again, err, now)
	}
}

func TestFollowEnds(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, tiny("tiny"))
	publish(t, b, "tiny", 1, 10)
	boom := errors.New("boom")
	var in inbox
	err := outcome(t, follow(t, b, bus.All(), func(m bus.Message) error {
		if m.Seq == 4 {
			return boom
		}
		return in.add(m)
	}))
	if err != boom {
		t.Errorf("got %v, want the function's own error", err)
	}
	counted(t, in.texts(), 1, 3)

	ctx, cancel := context.WithCancel(t.Context())
	seen := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- b.Follow(ctx, "TINY", bus.FromSeq(10), func(bus.Message) error { close(seen); return nil })
	}()
	<-seen
	cancel()
	if err := outcome(t, done); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's", err)
	}
	stream, err := raw(t, s).Stream(t.Context(), "TINY")
	if err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "nothing left on the server", func() bool {
		info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter(">"))
		return err == nil && info.State.Consumers == 0
	})
}

func TestPending(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b, tiny("tiny"))
	publish(t, b, "tiny", 1, 100)
	var in inbox
	follow(t, b, bus.All(), in.add)
	bustest.Await(t, "messages", func() bool { return in.len() == 100 })
	for i, m := range in.got {
		if m.Pending != uint64(99-i) {
			t.Fatalf("message %d says that %d are behind it", i+1, m.Pending)
		}
	}
}

// A stream that is restored from a backup is not the one that was read, also where it has grown since to beyond
// what was read. One that was purged still is.
func TestFollowNoticesARestore(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, tiny("tiny"))
	publish(t, b, "tiny", 1, 3)
	s.Stop()
	restore := s.Backup()
	s.Restart()
	bustest.Await(t, "connection", b.Connected)
	publish(t, b, "tiny", 4, 6)

	var got inbox
	late := s.Bus(t) // its connection is cut while the stream grows
	ended := make(chan error, 1)
	hold := make(chan struct{})
	go func() {
		ended <- late.Follow(t.Context(), "TINY", bus.All(), func(m bus.Message) error {
			err := got.add(m)
			if m.Seq == 7 {
				<-hold
			}
			return err
		})
	}()
	bustest.Await(t, "the messages", func() bool { return got.len() == 6 })
	s.Restart() // the same stream: it goes on
	if err := b.Purge(t.Context(), "TINY", 7); err != nil {
		bustest.Await(t, "connection", b.Connected)
		if err := b.Purge(t.Context(), "TINY", 7); err != nil {
			t.Fatal(err)
		}
	}
	publish(t, b, "tiny", 7, 7)
	bustest.Await(t, "the next message", func() bool { return got.len() == 7 })

	s.Stop()
	restore()
	s.Restart()
	bustest.Await(t, "connection", b.Connected)
	publish(t, b, "tiny", 104, 109) // to 9, beyond 7
	close(hold)
	select {
	case err := <-ended:
		if !errors.Is(err, bus.ErrStreamReset) {
			t.Errorf("got %v, want ErrStreamReset", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("not noticed")
	}
	counted(t, got.texts(), 1, 7)
}

package bus_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// callTimeout is how long the bus waits for an answer.
const callTimeout = 5 * time.Second

// parcel is the message of a test's outbox.
type parcel struct {
	N     uint64
	Items []int
}

func encodeParcel(n uint64, batch []int) ([]byte, error) { return json.Marshal(parcel{n, batch}) }

func newOutbox(t *testing.T, b *bus.Bus, fn ...func(*bus.OutboxConfig[int])) *bus.Outbox[int] {
	t.Helper()
	cfg := bus.OutboxConfig[int]{Subject: "tiny", ID: "boot", Encode: encodeParcel, Log: zerolog.Nop()}
	for _, f := range fn {
		f(&cfg)
	}
	o, err := bus.NewOutbox(b, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// start runs an outbox until the test ends.
func start(t *testing.T, o *bus.Outbox[int]) {
	t.Helper()
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	wg.Go(func() {
		if err := o.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
}

func shut(t *testing.T, o *bus.Outbox[int]) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	return o.Close(ctx)
}

func idStream() events.Stream {
	s := tiny("tiny")
	s.Dedup = time.Minute
	return s
}

// delivered reads what the outbox stored, and fails unless the batches are
// numbered from 1 and their items are 1 to last, each once, in order.
func delivered(t *testing.T, b *bus.Bus, last int) []parcel {
	t.Helper()
	var parcels []parcel
	next := 1
	for i, m := range stored(t, b, "TINY") {
		var p parcel
		if err := json.Unmarshal(m.Data, &p); err != nil {
			t.Fatal(err)
		}
		if p.N != uint64(i+1) {
			t.Fatalf("message %d is batch %d", i+1, p.N)
		}
		for _, item := range p.Items {
			if item != next {
				t.Fatalf("batch %d holds item %d, want %d", p.N, item, next)
			}
			next++
		}
		parcels = append(parcels, p)
	}
	if next != last+1 {
		t.Errorf("stored %d items, want %d", next-1, last)
	}
	return parcels
}

func TestOutboxBatches(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b, idStream())
	o := newOutbox(t, b, func(c *bus.OutboxConfig[int]) { c.MaxWait = time.Hour })
	start(t, o)
	for i := range 600 {
		o.Add(i + 1)
	}
	bustest.Await(t, "two full batches", func() bool { return o.Stats().Published == 512 })
	if s := o.Stats(); s.Queued != 88 || s.Lost != 0 || s.Oldest <= 0 {
		t.Errorf("got %+v, want 88 waiting", s)
	}
	if err := shut(t, o); err != nil {
		t.Fatal(err)
	}
	if s := o.Stats(); s.Queued != 0 || s.Published != 600 || s.Oldest != 0 {
		t.Errorf("after Close: %+v", s)
	}
	if got := delivered(t, b, 600); len(got) != 3 {
		t.Errorf("got %d batches, want 3", len(got))
	}
	if o.Add(601) {
		t.Error("a closed outbox took an item")
	}
	if err := shut(t, o); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestOutboxWaitsBriefly(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b, idStream())
	o := newOutbox(t, b)
	start(t, o)
	for i := range 3 { // each alone, far below a full batch
		o.Add(i + 1)
		bustest.Await(t, "acknowledgement", func() bool { return o.Stats().Published == uint64(i+1) })
	}
	delivered(t, b, 3)
}

// TestOutboxOverRestarts adds from several goroutines while the server goes
// away and comes back in the middle of what is in flight.
func TestOutboxOverRestarts(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, idStream())
	o := newOutbox(t, b)
	start(t, o)
	var mu sync.Mutex
	n := 0
	stop := make(chan struct{})
	var adders sync.WaitGroup
	for range 3 {
		adders.Go(func() {
			tick := time.NewTicker(200 * time.Microsecond)
			defer tick.Stop()
			for {
				select {
				case <-stop:
					return
				case <-tick.C:
				}
				mu.Lock()
				n++
				if !o.Add(n) {
					t.Error("lost")
				}
				mu.Unlock()
			}
		})
	}
	for range 4 {
		before := o.Stats().Published
		bustest.Await(t, "progress", func() bool { return o.Stats().Published > before+200 })
		s.Restart()
	}
	close(stop)
	adders.Wait()
	if err := shut(t, o); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "connection", b.Connected)
	delivered(t, b, n)
}

// TestOutboxLosesAcks lets batches arrive and their acknowledgements vanish:
// each is sent again, and stored once.
func TestOutboxLosesAcks(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t, bustest.Listen())
	direct := s.Bus(t)
	provision(t, direct, idStream())
	proxy := bustest.NewProxy(t, s.URL())
	b, err := bus.Connect(t.Context(), bus.Config{Name: "edge", URL: proxy.Addr()}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	bustest.Await(t, "connection", b.Connected)
	o := newOutbox(t, b)
	start(t, o)
	stored := func() uint64 {
		state, err := direct.Stream(t.Context(), "TINY")
		if err != nil {
			t.Fatal(err)
		}
		return state.Msgs
	}
	for i := range 5 {
		proxy.Mute()
		before := stored()
		o.Add(2*i + 1)
		bustest.Await(t, "arrival", func() bool { return stored() == before+1 })
		if o.Stats().Published != uint64(2*i) {
			t.Fatalf("counted as published without an acknowledgement: %+v", o.Stats())
		}
		o.Add(2*i + 2)
		proxy.Heal()
		healed := time.Now()
		bustest.Await(t, "acknowledgements", func() bool { return o.Stats().Published == uint64(2*i+2) })
		if took := time.Since(healed); took > callTimeout-time.Second {
			t.Errorf("waited %v for an answer that could not come any more", took)
		}
	}
	delivered(t, direct, 10)
}

func TestOutboxIsBounded(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, idStream())
	s.Stop()
	o := newOutbox(t, b, func(c *bus.OutboxConfig[int]) { c.MaxQueued = 100 })
	start(t, o)
	for i := range 130 {
		if took := o.Add(i + 1); took != (i < 100) {
			t.Fatalf("Add %d: %v", i+1, took)
		}
	}
	if s := o.Stats(); s.Queued != 100 || s.Lost != 30 {
		t.Errorf("got %+v, want 100 queued, 30 lost", s)
	}
	s.Restart()
	bustest.Await(t, "the queue to empty", func() bool { return o.Stats().Published == 100 })
	delivered(t, b, 100)
}

func TestOutboxCloseIsBounded(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, idStream())
	s.Stop()
	for _, running := range []bool{true, false} {
		o := newOutbox(t, b)
		if running {
			start(t, o)
		}
		o.Add(1)
		o.Add(2)
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		began := time.Now()
		err := o.Close(ctx)
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > 2*time.Second {
			t.Errorf("got %v after %v, want the deadline's", err, time.Since(began))
		}
		if s := o.Stats(); s.Queued != 0 || s.Lost != 2 {
			t.Errorf("got %+v, want what was left counted as lost", s)
		}
	}
}

// TestOutboxCloseTakesOver ends Run with a batch in flight, which Close must
// send under the number and with the bytes that it had.
func TestOutboxCloseTakesOver(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, idStream())
	s.Stop()
	var encoded sync.Map
	o := newOutbox(t, b, func(c *bus.OutboxConfig[int]) {
		c.Encode = func(n uint64, batch []int) ([]byte, error) {
			if _, twice := encoded.LoadOrStore(n, true); twice {
				return nil, fmt.Errorf("batch %d was encoded twice", n)
			}
			return encodeParcel(n, batch)
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- o.Run(ctx) }()
	o.Add(1)
	bustest.Await(t, "a batch in flight", func() bool { _, ok := encoded.Load(uint64(1)); return ok })
	o.Add(2)
	cancel()
	if err := <-ran; err != nil {
		t.Fatal(err)
	}
	s.Restart()
	if err := shut(t, o); err != nil {
		t.Fatal(err)
	}
	if got := delivered(t, b, 2); len(got) != 2 {
		t.Errorf("got %v, want the batch in flight as it was, then the rest", got)
	}
}

func TestOutboxSurvivesWhatCannotBeSent(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	s := idStream()
	s.MaxMessage = 400
	provision(t, b, s)
	o := newOutbox(t, b, func(c *bus.OutboxConfig[int]) {
		c.MaxBatch = 64
		c.MaxWait = 50 * time.Millisecond
		c.MaxBytes = 500 // above the stream's bound, so that both are met
		c.Encode = func(n uint64, batch []int) ([]byte, error) {
			for _, item := range batch {
				if item < 0 {
					return nil, errors.New("item below zero")
				}
			}
			data, err := encodeParcel(n, batch)
			if batch[0] == 1000 {
				data = append(data, make([]byte, 350)...)
			}
			if batch[0] == 2000 {
				data = append(data, make([]byte, 500)...)
			}
			return data, err
		}
	})
	o.Add(-1) // its batch cannot be encoded
	start(t, o)
	bustest.Await(t, "the loss", func() bool { return o.Stats().Lost == 1 })
	o.Add(2000) // alone already above the outbox's bound
	bustest.Await(t, "the loss", func() bool { return o.Stats().Lost == 2 })
	for i := range 512 {
		o.Add(i + 1)
	}
	bustest.Await(t, "the rest", func() bool { return o.Stats().Published == 512 })
	o.Add(1000) // alone already above the stream's bound
	bustest.Await(t, "the loss", func() bool { return o.Stats().Lost == 3 })
	delivered(t, b, 512) // numbers without a gap, whatever was lost between
}

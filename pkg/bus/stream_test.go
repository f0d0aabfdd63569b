package bus_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nats.go/micro"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// TestProvision creates every stream of the system from several sides at once,
// again over what they hold, and changes one.
func TestProvision(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	var wg sync.WaitGroup
	for range 3 {
		b := s.Bus(t)
		bustest.Await(t, "connection", b.Connected)
		wg.Go(func() {
			if err := b.Provision(t.Context(), events.Streams()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	b := s.Bus(t)
	bustest.Await(t, "connection", b.Connected)
	publish(t, b, events.SubjectAudit, 1, 3)
	before, err := b.Stream(t.Context(), events.StreamAudit)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
	after, err := b.Stream(t.Context(), events.StreamAudit)
	if err != nil || after != before || after.Msgs != 3 || after.First != 1 || after.Last != 3 {
		t.Errorf("provisioning again: %+v, %v; before %+v", after, err, before)
	}

	changed := events.Streams()
	for i := range changed {
		changed[i].Description += " (changed)"
		changed[i].MaxBytes /= 2
	}
	if err := b.Provision(t.Context(), changed); err != nil {
		t.Fatal(err)
	}
	js := raw(t, s)
	for _, want := range changed {
		stream, err := js.Stream(t.Context(), want.Name)
		if err != nil {
			t.Fatal(err)
		}
		got := stream.CachedInfo().Config
		if got.Storage != jetstream.FileStorage || got.Description != want.Description || got.MaxAge != want.MaxAge ||
			got.Duplicates != want.Dedup || max(0, got.MaxBytes) != want.MaxBytes || max(0, got.MaxMsgsPerSubject) != want.MaxPerSubject ||
			(got.Discard == jetstream.DiscardNew) != want.RefuseNew || max(0, got.MaxMsgSize) != want.MaxMessage {
			t.Errorf("%s: got %+v, want %+v", want.Name, got, want)
		}
	}
}

func TestProvisionWithoutServer(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	s.Stop()
	b := s.Bus(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := b.Provision(ctx, events.Streams()); !errors.Is(err, bus.ErrUnavailable) {
		t.Errorf("got %v, want ErrUnavailable", err)
	}
}

func TestLastAndPurge(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b, tiny("tiny.*"))
	publish(t, b, "tiny.a", 1, 5)
	publish(t, b, "tiny.b", 6, 8)
	m, err := b.Last(t.Context(), "TINY", "tiny.a")
	if err != nil || m.Seq != 5 || string(m.Data) != "5" || m.Time.IsZero() || m.Subject != "tiny.a" {
		t.Errorf("got %+v, %v", m, err)
	}
	if _, err := b.Last(t.Context(), "TINY", "tiny.c"); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
	if _, err := b.Last(t.Context(), "NONE", "tiny.c"); !errors.Is(err, bus.ErrNoStream) {
		t.Errorf("got %v, want ErrNoStream", err)
	}
	if err := b.Purge(t.Context(), "TINY", 6); err != nil {
		t.Fatal(err)
	}
	if s, err := b.Stream(t.Context(), "TINY"); err != nil || s.First != 6 || s.Last != 8 || s.Msgs != 3 {
		t.Errorf("got %+v, %v: want 6 to 8 left", s, err)
	}
	if err := b.Purge(t.Context(), "TINY", 0); err == nil {
		t.Error("purge below 0 was accepted: it would remove everything")
	}
	if err := b.Purge(t.Context(), "TINY", 9); err != nil {
		t.Fatal(err)
	}
	if s, err := b.Stream(t.Context(), "TINY"); err != nil || s.First != 9 || s.Last != 8 || s.Msgs != 0 {
		t.Errorf("got %+v, %v: want an empty stream that knows where it ended", s, err)
	}
}

func TestServe(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	bustest.Await(t, "connection", b.Connected)
	var in inbox
	sub, err := b.Serve(bus.ServiceInfo{
		Name: "aegis-config", Version: "1.0.0", Description: "for a test", Endpoint: "command", Subject: events.SubjectConfigCommand,
	}, func(r bus.Request) ([]byte, *bus.ServiceError) {
		in.take(bus.Message{Subject: r.Subject, Data: r.Data, Header: r.Header})
		if len(r.Header["X-Admin-Token"]) == 0 {
			return []byte("detail"), &bus.ServiceError{Code: "401", Description: "X-Admin-Token is missing"}
		}
		return append([]byte("did "), r.Data...), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect("", nats.InProcessServer(s), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	request := func(token string) *nats.Msg {
		t.Helper()
		m := nats.NewMsg(events.SubjectConfigCommand)
		m.Data = []byte("it")
		if token != "" {
			m.Header.Set("X-Admin-Token", token)
		}
		answer, err := nc.RequestMsg(m, 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
	var answer *nats.Msg
	bustest.Await(t, "the service", func() bool {
		_, err := nc.Request("$SRV.PING.aegis-config", nil, time.Second)
		return err == nil
	})
	if answer = request("t"); string(answer.Data) != "did it" || answer.Header.Get(micro.ErrorHeader) != "" {
		t.Errorf("got %s, %v", answer.Data, answer.Header)
	}
	answer = request("")
	if answer.Header.Get(micro.ErrorCodeHeader) != "401" || answer.Header.Get(micro.ErrorHeader) != "X-Admin-Token is missing" || string(answer.Data) != "detail" {
		t.Errorf("a refusal came as %s, %v", answer.Data, answer.Header)
	}

	// A plain publish reaches it as well.
	before := in.len()
	m := nats.NewMsg(events.SubjectConfigCommand)
	m.Header.Set("X-Admin-Token", "t")
	if err := nc.PublishMsg(m); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "the plain publish", func() bool { return in.len() == before+1 })

	// What `nats micro ls` and `nats micro info` ask.
	found, err := nc.Request("$SRV.INFO.aegis-config", nil, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var info micro.Info
	if err := json.Unmarshal(found.Data, &info); err != nil || len(info.Endpoints) != 1 || info.Endpoints[0].Subject != events.SubjectConfigCommand {
		t.Errorf("got %s, %v", found.Data, err)
	}

	// It outlives a restart of the server.
	s.Restart()
	bustest.Await(t, "the service after the restart", func() bool {
		_, err := nc.Request("$SRV.PING.aegis-config", nil, 100*time.Millisecond)
		return err == nil
	})
	sub.Stop()
	bustest.Await(t, "the end of the service", func() bool {
		_, err := nc.Request(events.SubjectConfigCommand, nil, 100*time.Millisecond)
		return errors.Is(err, nats.ErrNoResponders)
	})
}

func TestServeRefusesABadName(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	_, err := b.Serve(bus.ServiceInfo{Name: "no spaces", Version: "1.0.0", Endpoint: "e", Subject: "s"}, nil)
	if err == nil {
		t.Error("accepted")
	}
}

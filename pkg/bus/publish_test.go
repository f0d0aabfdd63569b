package bus_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
)

func TestPublishExpectations(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b, tiny("tiny.*"))
	for _, step := range []struct {
		subject string
		opt     bus.PublishOption
		seq     uint64
		err     error
	}{
		{"tiny.a", bus.WithLastSubjectSeq(0), 1, nil},
		{"tiny.a", bus.WithLastSubjectSeq(0), 0, bus.ErrConflict},
		{"tiny.b", bus.WithLastSubjectSeq(0), 2, nil},
		{"tiny.a", bus.WithLastSubjectSeq(1), 3, nil},
		{"tiny.a", bus.WithLastSeq(2), 0, bus.ErrConflict},
		{"tiny.b", bus.WithLastSeq(3), 4, nil},
		{"tiny.a", bus.WithMsgID("x"), 5, nil},
		{"tiny.a", bus.WithMsgID("x"), 5, nil}, // stored already
		{"tiny.a", bus.WithMsgID("y"), 6, nil},
		{"other", bus.WithMsgID("z"), 0, bus.ErrNoStream},
	} {
		seq, err := b.Publish(t.Context(), step.subject, nil, step.opt)
		if seq != step.seq || !errors.Is(err, step.err) {
			t.Errorf("%+v: got %d, %v", step, seq, err)
		}
	}
}

func TestPublishToAFullStream(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	s := tiny("tiny")
	s.MaxBytes, s.RefuseNew, s.MaxMessage = 4096, true, 1024
	provision(t, b, s)
	var err error
	for range 10 {
		if _, err = b.Publish(t.Context(), "tiny", make([]byte, 1000)); err != nil {
			break
		}
	}
	if !errors.Is(err, bus.ErrFull) {
		t.Errorf("got %v, want ErrFull", err)
	}
	if _, err := b.Publish(t.Context(), "tiny", make([]byte, 1025)); !errors.Is(err, bus.ErrTooLarge) {
		t.Errorf("above the stream's bound: got %v, want ErrTooLarge", err)
	}
	if _, err := b.Publish(t.Context(), "tiny", make([]byte, 2<<20)); !errors.Is(err, bus.ErrTooLarge) {
		t.Errorf("above the server's bound: got %v, want ErrTooLarge", err)
	}
}

func TestPublishWithoutServer(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	s.Stop()
	bustest.Await(t, "disconnect", func() bool { return !b.Connected() })
	began := time.Now()
	_, err := b.Publish(t.Context(), events.SubjectAudit, nil)
	if !errors.Is(err, bus.ErrUnavailable) {
		t.Errorf("got %v, want ErrUnavailable", err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("took %v to notice that there is no connection", took)
	}
	s.Restart()
	bustest.Await(t, "publishing after the restart", func() bool {
		_, err := b.Publish(t.Context(), events.SubjectAudit, nil)
		return err == nil
	})
}

// TestPublishIsBounded stalls the network after the connection was made: no
// error comes from anywhere, only time passes.
func TestPublishIsBounded(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t, bustest.Listen())
	proxy := bustest.NewProxy(t, s.URL())
	b, err := bus.Connect(t.Context(), bus.Config{Name: "test", URL: proxy.Addr()}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	provision(t, b, tiny("tiny"))
	proxy.Stall()
	t.Cleanup(proxy.Heal)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err = b.Publish(ctx, "tiny", nil)
	if took := time.Since(began); !errors.Is(err, bus.ErrUnavailable) || took > 2*time.Second {
		t.Errorf("got %v after %v, want ErrUnavailable after 0.3 s", err, took)
	}
	// Send must not wait at all, however much is behind it.
	began = time.Now()
	var refused error
	data := make([]byte, 4096)
	for range 20_000 {
		if err := b.Send("core", data); err != nil {
			refused = err
		}
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("20,000 Sends took %v on a stalled connection", took)
	}
	if !errors.Is(refused, bus.ErrUnavailable) || b.Stats().Dropped == 0 {
		t.Errorf("80 MB went nowhere: got %v and %+v, want a bound and a count", refused, b.Stats())
	}
}

func TestDeniedPublishFailsAtOnce(t *testing.T) {
	t.Parallel()
	s := confined(t, []string{"allowed", "$JS.API.STREAM.INFO.TINY"}, []string{"_INBOX_test.>"})
	admin := s.Bus(t, login("admin"), func(c *bus.Config) { c.Name = "admin" })
	provision(t, admin, tiny("allowed", "forbidden"))
	b := s.Bus(t, login("test"))
	bustest.Await(t, "connection", b.Connected)

	if _, err := b.Publish(t.Context(), "allowed", nil); err != nil {
		t.Errorf("allowed: %v", err)
	}
	began := time.Now()
	_, err := b.Publish(t.Context(), "forbidden", nil)
	if !errors.Is(err, bus.ErrDenied) || !strings.Contains(err.Error(), `"forbidden"`) {
		t.Errorf("got %v, want ErrDenied naming the subject", err)
	}
	if err := b.Purge(t.Context(), "TINY", 1); !errors.Is(err, bus.ErrDenied) {
		t.Errorf("purge: got %v, want ErrDenied", err)
	}
	if err := b.Provision(t.Context(), []events.Stream{tiny("allowed")}); !errors.Is(err, bus.ErrDenied) {
		t.Errorf("provision: got %v, want ErrDenied", err)
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("took %v: the refusals were waited out", took)
	}
	if _, err := b.Publish(t.Context(), "allowed", nil); err != nil {
		t.Errorf("a refusal outlived its publish: %v", err)
	}
	if b.Stats().Denied < 3 {
		t.Errorf("got %+v, want every refusal counted", b.Stats())
	}
}

func TestSendAndSubscribe(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	from, to := s.Bus(t), s.Bus(t)
	bustest.Await(t, "connections", func() bool { return from.Connected() && to.Connected() })
	var in inbox
	sub, err := to.Subscribe(events.AllHeartbeats, in.take)
	if err != nil {
		t.Fatal(err)
	}
	// The first messages may be sent before the server knows of the subscription.
	n := 0
	bustest.Await(t, "first message", func() bool {
		n++
		if err := from.Send(events.SubjectHeartbeat("e"), fmt.Append(nil, n)); err != nil {
			t.Fatal(err)
		}
		return in.len() > 0
	})
	bustest.Await(t, "the rest", func() bool { texts := in.texts(); return texts[len(texts)-1] == fmt.Sprint(n) })
	if !slices.IsSortedFunc(in.texts(), func(a, b string) int { return len(a)*1000 - len(b)*1000 + strings.Compare(a, b) }) {
		t.Errorf("out of order: %v", in.texts())
	}

	// Without a server: at once an error, and nothing is delivered late.
	before := in.len()
	s.Stop()
	bustest.Await(t, "disconnect", func() bool { return !from.Connected() && !to.Connected() })
	if err := from.Send(events.SubjectHeartbeat("e"), []byte("stale")); !errors.Is(err, bus.ErrUnavailable) {
		t.Errorf("got %v, want ErrUnavailable", err)
	}
	s.Restart()
	bustest.Await(t, "the subscription after the restart", func() bool {
		_ = from.Send(events.SubjectHeartbeat("e"), []byte("fresh"))
		return in.len() > before
	})
	if slices.Contains(in.texts(), "stale") {
		t.Error("a message sent without a connection was delivered later")
	}
	sub.Stop()
	if err := from.Send(events.SubjectHeartbeat("e"), []byte("last")); err != nil {
		t.Error(err)
	}
	// A second subscription stands for "time enough has passed for the first".
	if _, err := to.Subscribe("after", in.take); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, "a later message", func() bool {
		_ = from.Send("after", []byte("after"))
		return slices.Contains(in.texts(), "after")
	})
	if slices.Contains(in.texts(), "last") {
		t.Error("delivered after Stop")
	}
}

func TestCloseSendsWhatWasTaken(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	to := s.Bus(t)
	var in inbox
	if _, err := to.Subscribe("core", in.take); err != nil {
		t.Fatal(err)
	}
	provision(t, to, tiny("tiny")) // and so the server knows of the subscription
	from := s.Bus(t)
	bustest.Await(t, "connection", from.Connected)
	for i := 1; i <= 1000; i++ {
		if err := from.Send("core", fmt.Append(nil, i)); err != nil {
			t.Fatal(err)
		}
	}
	from.Close()
	from.Close()
	bustest.Await(t, "the messages", func() bool { return in.len() == 1000 })
	counted(t, in.texts(), 1, 1000)
	if err := from.Send("core", nil); !errors.Is(err, bus.ErrUnavailable) {
		t.Errorf("after Close: got %v", err)
	}
}

func TestConnectBeforeTheServer(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	s.Stop()
	b := s.Bus(t)
	if b.Connected() {
		t.Fatal("connected to nothing")
	}
	var in inbox
	if _, err := b.Subscribe("core", in.take); err != nil {
		t.Fatalf("subscribing while disconnected: %v", err)
	}
	s.Restart()
	bustest.Await(t, "message", func() bool { _ = b.Send("core", nil); return in.len() > 0 })
}

// TestPasswordComesLater rotates the password: a wrong one is no reason to give up.
func TestPasswordComesLater(t *testing.T) {
	t.Parallel()
	s := confined(t, []string{">"}, []string{">"}, bustest.Listen())
	path := filepath.Join(t.TempDir(), "password")
	write := func(pw string) {
		if err := os.WriteFile(path, []byte(pw+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("wrong")
	proxy := bustest.NewProxy(t, s.URL())
	b, err := bus.Connect(t.Context(), bus.Config{Name: "test", URL: proxy.Addr(), User: "test", PasswordFile: path}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	if b.Connected() {
		t.Fatal("let in with a wrong password")
	}
	bustest.Await(t, "several attempts", func() bool { return proxy.Accepted() >= 4 })
	write("secret")
	bustest.Await(t, "connection", b.Connected)
}

func TestConfigValidate(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		cfg  bus.Config
		want string
	}{
		{bus.Config{Name: "x"}, "nats-url"},
		{bus.Config{URL: "nats://h"}, "Name"},
		{bus.Config{Name: "x", URL: "nats://h", Password: "p"}, "nats-user"},
		{bus.Config{Name: "x", URL: "nats://h", User: "u", Password: "p", PasswordFile: "f"}, "not both"},
		{bus.Config{Name: "x", URL: "nats://h", Replicas: 2}, "nats-replicas"},
		{bus.Config{Name: "x", URL: "nats://h", User: "u", PasswordFile: "/nonexistent"}, "nats-password-file"},
		{bus.Config{Name: "x", URL: "nats://bad host:1"}, "nats-url"},
	} {
		b, err := bus.Connect(t.Context(), c.cfg, zerolog.Nop())
		if err == nil {
			b.Close()
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got %v, want %q named", c.cfg, err, c.want)
		}
	}
}

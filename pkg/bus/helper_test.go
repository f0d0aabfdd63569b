package bus_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// A small stream for tests of their own bounds.
func tiny(subjects ...string) events.Stream {
	return events.Stream{Name: "TINY", Description: "for a test", Subjects: subjects}
}

func provision(t *testing.T, b *bus.Bus, s events.Stream) {
	t.Helper()
	bustest.Await(t, "connection", b.Connected)
	if err := b.Provision(t.Context(), []events.Stream{s}); err != nil {
		t.Fatal(err)
	}
}

// raw is a plain client, for what the bus does not do.
func raw(t *testing.T, s *bustest.Server) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(s), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// publish stores messages whose data is their number, from first to last.
func publish(t *testing.T, b *bus.Bus, subject string, first, last int) {
	t.Helper()
	for i := first; i <= last; i++ {
		if _, err := b.Publish(t.Context(), subject, fmt.Append(nil, i)); err != nil {
			t.Fatal(err)
		}
	}
}

// stored reads a whole stream.
func stored(t *testing.T, b *bus.Bus, stream string) []bus.Message {
	t.Helper()
	state, err := b.Stream(t.Context(), stream)
	if err != nil {
		t.Fatal(err)
	}
	if state.Msgs == 0 {
		return nil
	}
	var all []bus.Message
	done := errors.New("done")
	err = b.Follow(t.Context(), stream, bus.All(), func(m bus.Message) error {
		all = append(all, m)
		if m.Seq == state.Last {
			return done
		}
		return nil
	})
	if !errors.Is(err, done) {
		t.Fatal(err)
	}
	return all
}

// inbox collects messages.
type inbox struct {
	mu  sync.Mutex
	got []bus.Message
}

func (i *inbox) add(m bus.Message) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.got = append(i.got, m)
	return nil
}

func (i *inbox) take(m bus.Message) { i.add(m) }

func (i *inbox) texts() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	texts := make([]string, len(i.got))
	for k, m := range i.got {
		texts[k] = string(m.Data)
	}
	return texts
}

func (i *inbox) len() int { return len(i.texts()) }

// counted fails unless texts are the numbers from first to last, each once, in order.
func counted(t *testing.T, texts []string, first, last int) {
	t.Helper()
	if len(texts) != last-first+1 {
		t.Errorf("got %d messages, want %d", len(texts), last-first+1)
	}
	for k, text := range texts {
		if text != fmt.Sprint(first+k) {
			t.Fatalf("message %d is %s, want %d", k, text, first+k)
		}
	}
}

// confined starts a server with one user "test", password "secret", who has only these permissions.
func confined(t *testing.T, publish, subscribe []string, opts ...bustest.Option) *bustest.Server {
	t.Helper()
	conf := fmt.Sprintf(`
		authorization { users: [
			{ user: admin, password: secret }
			{ user: test, password: secret, permissions: {
				publish: { allow: ["%s"] }, subscribe: { allow: ["%s"] } } }
		] }`, strings.Join(publish, `","`), strings.Join(subscribe, `","`))
	path := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(path, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	return bustest.Start(t, append(opts, bustest.ConfigFile(path))...)
}

func login(user string) func(*bus.Config) {
	return func(c *bus.Config) { c.User, c.Password = user, "secret" }
}

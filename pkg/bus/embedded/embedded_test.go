package embedded_test

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus/embedded"
	"github.com/aegisrate/aegisrate/pkg/events"
)

func TestListensAndKeeps(t *testing.T) {
	t.Parallel()
	cfg := embedded.Config{StoreDir: t.TempDir(), Port: -1, Log: zerolog.Nop()}
	for round := range uint64(2) {
		s, err := embedded.Start(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(s.URL(), "nats://127.0.0.1:") {
			t.Errorf("listens on %s, want loopback only", s.URL())
		}
		nc, err := nats.Connect(s.URL())
		if err != nil {
			t.Fatal(err)
		}
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		stream, err := js.CreateOrUpdateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
		if err != nil {
			t.Fatal(err)
		}
		if got := stream.CachedInfo().State.Msgs; got != round {
			t.Errorf("round %d: holds %d messages", round, got)
		}
		// The largest message that the system allows.
		large := make([]byte, maxConfigMessage(t))
		if _, err := js.Publish(t.Context(), "s", large); err != nil {
			t.Errorf("a message of %d bytes: %v", len(large), err)
		}
		nc.Close()
		s.Shutdown()
		s.Shutdown()
	}
}

func maxConfigMessage(t *testing.T) int32 {
	t.Helper()
	for _, s := range events.Streams() {
		if s.Name == events.StreamConfig {
			return s.MaxMessage
		}
	}
	t.Fatal("no config stream")
	return 0
}

func TestInProcessOnly(t *testing.T) {
	t.Parallel()
	s, err := embedded.Start(embedded.Config{StoreDir: t.TempDir(), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Shutdown()
	if s.URL() != "" {
		t.Errorf("listens on %s, though not asked to", s.URL())
	}
	nc, err := nats.Connect("", nats.InProcessServer(s.InProcess()))
	if err != nil {
		t.Fatal(err)
	}
	nc.Close()
}

func TestCannotStart(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	taken := ln.Addr().(*net.TCPAddr).Port
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("no: [config"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		cfg  embedded.Config
		want string
	}{
		"port taken":   {embedded.Config{StoreDir: t.TempDir(), Port: taken}, "address already in use"},
		"no directory": {embedded.Config{}, "StoreDir"},
		"a file":       {embedded.Config{StoreDir: file}, "not a directory"},
		"bad config":   {embedded.Config{StoreDir: t.TempDir(), ConfigFile: file}, "embedded NATS"},
		"no config":    {embedded.Config{StoreDir: t.TempDir(), ConfigFile: file + "x"}, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			c.cfg.Log = zerolog.Nop()
			s, err := embedded.Start(c.cfg)
			if err == nil {
				s.Shutdown()
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q in it", err, c.want)
			}
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("took %v to say so", took)
			}
		})
	}
}

package edge

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// What stands in the stream since a healthwatch that is dead pins nothing; what comes live
// counts, also where the clocks of NATS and the edge differ.
func TestHealthFeed(t *testing.T) {
	t.Parallel()
	f := healthFeed{
		multipliers: admission.NewMultipliers(time.Now),
		metrics:     &metrics{badHealth: prometheus.NewCounter(prometheus.CounterOpts{Name: "x"})},
		log:         zerolog.Nop(),
	}
	message := func(subject, upstream string, age time.Duration) bus.Message {
		data, err := events.Encode(events.Health{Upstream: upstream, Tick: 1, Multiplier: 500_000})
		if err != nil {
			t.Fatal(err)
		}
		return bus.Message{Subject: events.SubjectHealth(subject), Data: data, Time: time.Now().Add(-age)}
	}
	want := func(what, upstream string, m int64) {
		t.Helper()
		if got := f.multipliers.Get(upstream); got != m {
			t.Errorf("%s: %d, want %d", what, got, m)
		}
	}
	take := f.begin()
	take(message("a", "a", time.Hour))
	want("an old one that stood there", "a", bucket.One)
	take(message("a", "a", time.Hour))
	want("a new one by another clock", "a", 500_000)
	take(message("b", "b", time.Second))
	want("a fresh one that stood there", "b", 500_000)
	take(message("d", "c", 0))
	want("one under another's subject", "c", bucket.One)
	want("one under another's subject", "d", bucket.One)
}

// Whatever comes on the config stream, whole messages or documents in a good one: a version is
// obeyed and kept on disk, or the last good one stays. The next good one is obeyed in any case.
func FuzzConfigFeed(f *testing.F) {
	const good = `{"upstreams":{"u":{"url":"http://h"}},"routes":{"r":{"path":"/","upstream":"u","capacity":5,"refill_rate":1}}}`
	wire := func(version uint64, doc string) []byte {
		data, err := events.Encode(events.ConfigVersion{Version: version, By: "test", Via: "nats", Time: time.Unix(0, 0), Document: []byte(doc)})
		if err != nil {
			return nil // the document is no JSON, so nobody can send it so
		}
		return data
	}
	for _, doc := range []string{
		good, "", "null", "{}", `{"routes":{"r":{"path":"/","capacity":0}}}`, `{"a":1,"a":2}`, `{"upstreams":{"u":{"url":"http://h"}},"unknown":1}`,
		`{"routes":{"r":{"path":"/","upstream":"u","capacity":1e308,"refill_rate":NaN}}}`, strings.Repeat("[", 500), strings.Replace(good, `"/"`, `"/x"`, 1),
	} {
		f.Add([]byte(doc), false)
		f.Add(wire(2, doc), true)
	}
	f.Add([]byte(`{"type":"aegis.config.v1","version":18446744073709551615}`), true)
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte, whole bool) {
		one := func() prometheus.Counter { return prometheus.NewCounter(prometheus.CounterOpts{Name: "x"}) }
		feed := &policyFeed{engine: &admission.Engine{}, dir: dir, log: zerolog.Nop(), metrics: &metrics{rejected: one(), unknownKeys: one(), snapshotErrors: one()}}
		feed.take("s", bus.Message{Data: wire(1, good), Seq: 1})
		if !whole {
			if data = wire(2, string(data)); data == nil {
				return
			}
		}
		feed.take("s", bus.Message{Data: data, Seq: 2})
		version := feed.engine.Table().Version()
		if version != feed.version || version != 1 && version != 2 {
			t.Fatalf("version %d in force, %d noted", version, feed.version)
		}
		if stream, kept, err := readSnapshot(dir); err != nil || kept.Version != version || stream != "s" {
			t.Fatalf("kept on disk: %q %d, %v; in force: %d", stream, kept.Version, err, version)
		}
		feed.take("s", bus.Message{Data: wire(3, good), Seq: 3})
		if v := feed.engine.Table().Version(); v != 3 {
			t.Fatalf("a good version after %q: %d in force", data, v)
		}
	})
}

package edge_test

import (
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge"
)

// TestForgedConfig: with the controlplane's public key an edge obeys what is signed by it alone, however
// anything else came into the stream, and keeps nothing else on disk.
func TestForgedConfig(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	b := server.Bus(t)
	if err := b.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
	key := events.ConfigKey("secret")
	upstream := backend(t)
	add := func(version uint64, capacity int64, sign func(*events.ConfigVersion)) {
		t.Helper()
		v := events.ConfigVersion{Version: version, By: "test", Via: "http", Time: time.Now().UTC(), Document: encode(t, policyFor(t, upstream, capacity))}
		sign(&v)
		data, err := events.Encode(v)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Publish(t.Context(), events.SubjectConfigUpdates, data); err != nil {
			t.Fatal(err)
		}
	}
	signed := func(v *events.ConfigVersion) {
		if err := v.Sign(key); err != nil {
			t.Fatal(err)
		}
	}
	add(1, 5, signed)
	withKey := func(c *edge.Config) { c.ConfigPublicKey = events.PublicKeyText(key) }
	r := start(t, edge.Deps{Bus: server.Bus(t), Store: memstore.New(nil)}, withKey)
	r.awaitVersion(1)
	add(2, 100, func(*events.ConfigVersion) {}) // unsigned
	add(3, 101, func(v *events.ConfigVersion) { // by another key
		if err := v.Sign(events.ConfigKey("other")); err != nil {
			t.Fatal(err)
		}
	})
	add(4, 102, func(v *events.ConfigVersion) { signed(v); v.Document = encode(t, policyFor(t, upstream, 103)) }) // changed after it was signed
	bustest.Await(t, "three refusals", func() bool { return r.metric("aegis_edge_policy_rejected_total") == 3 })
	if d, err := r.ready(); err != nil || d.PolicyVersion != 1 {
		t.Errorf("version %d is obeyed, %v", d.PolicyVersion, err)
	}
	add(5, 6, signed)
	r.awaitVersion(5)
}

package edge

import (
	"crypto/sha256"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/rules"
)

// TestDirectoryRefreshes: what was missed is found at the refresh, what is unknown is asked for again,
// and no more is remembered than the bound.
func TestDirectoryRefreshes(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	b := server.Bus(t)
	if err := b.Provision(t.Context(), events.Streams()); err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	cfg.DataDir, cfg.MaxUsers, cfg.RulesTimeout = t.TempDir(), 2, 10*time.Second
	// It does not follow the bucket, so it misses everything.
	d, err := newDirectory(cfg, b, &metrics{lookupErrors: prometheus.NewCounter(prometheus.CounterOpts{})}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	d.now = func() time.Time { return now }
	put := func(name, plan string) {
		t.Helper()
		k := rules.Key{Hash: rules.HashOf(name)}
		owner, err := rules.EncodeOwner(name)
		if err != nil {
			t.Fatal(err)
		}
		user, err := rules.EncodeUser(rules.User{Name: name, Plan: plan, Keys: []rules.Key{k}})
		if err != nil {
			t.Fatal(err)
		}
		for key, data := range map[string][]byte{rules.HashKey(k.Hash): owner, rules.UserKey(name): user} {
			if _, err := b.Publish(t.Context(), events.SubjectRules(key), data); err != nil {
				t.Fatal(err)
			}
		}
	}
	plan := func(name string) string {
		u, known := d.User(sha256.Sum256([]byte(name)))
		if !known {
			return "unknown"
		}
		return u.Plan
	}
	put("ann", "free")
	if got := plan("ann"); got != "free" {
		t.Fatalf("got %s", got)
	}
	put("ann", "growth")
	if got := plan("ann"); got != "free" {
		t.Errorf("within the refresh the bucket is not asked; got %s", got)
	}
	now = now.Add(cfg.RulesRefresh + 1)
	bustest.Await(t, "the refresh", func() bool { return plan("ann") == "growth" })

	if got := plan("bea"); got != "unknown" {
		t.Errorf("got %s", got)
	}
	put("bea", "free")
	if got := plan("bea"); got != "unknown" {
		t.Errorf("unknown keys are remembered for a moment; got %s", got)
	}
	now = now.Add(unknownFor + 1)
	if got := plan("bea"); got != "free" {
		t.Errorf("got %s", got)
	}

	put("cid", "free")
	plan("cid")
	if got := d.byHash.Len(); got != 2 {
		t.Errorf("%d keys are remembered, want 2", got)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.byName) != 2 || d.byName["ann"] != nil {
		t.Errorf("the one seen longest ago is forgotten whole; %v", d.byName)
	}
}

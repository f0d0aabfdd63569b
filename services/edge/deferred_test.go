package edge_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/services/edge"
)

// What one edge answered 202 runs on whichever edge is there, once its limit has room, over restarts of NATS and of the
// edges; any edge gives its owner the answer.
func TestDeferredOutlivesEdgesAndNATS(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Provisioned(t)
	var ran atomic.Int32
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery != "" {
			ran.Add(1)
		}
		fmt.Fprintf(w, "answer to %s", r.URL.RawQuery)
	}))
	t.Cleanup(up.Close)
	p := policyFor(t, up.URL, 5)
	api := p.Routes["api"]
	api.RefillRate = 0.1
	p.Routes["api"] = api
	publish(t, b, p)
	shared := memstore.New(nil)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("sixteen bytes and more\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	edgeOn := func(b *bus.Bus) *rig {
		return start(t, edge.Deps{Bus: b, Store: shared}, func(c *edge.Config) { c.SecretFile = secret })
	}
	first := edgeOn(s.Bus(t))
	first.awaitVersion(1)
	for range 5 {
		first.get("/api")
	}
	res := first.get("/api?later")
	location := res.Header.Get("Location")
	if res.StatusCode != http.StatusAccepted || location == "" {
		t.Fatalf("%s %v", res.Status, res.Header)
	}
	if res := first.get(location); res.StatusCode != http.StatusAccepted || ran.Load() != 0 {
		t.Errorf("while it waits: %s, ran %d times", res.Status, ran.Load())
	}
	first.stop()
	s.Restart()
	bustest.Await(t, "connection", b.Connected)
	second, third := edgeOn(s.Bus(t)), edgeOn(s.Bus(t))
	for _, r := range []*rig{second, third} {
		r.awaitVersion(1)
		bustest.Await(t, "the answer", func() bool { return r.body(location) == "answer to later" }) // a few questions are refused
	}
	if ran.Load() != 1 {
		t.Errorf("it ran %d times", ran.Load())
	}
}

// body is the body of a GET's answer.
func (r *rig) body(path string) string {
	r.t.Helper()
	res, err := client.Get(r.url + path)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(body)
}

func TestUnusableSecretIsAnError(t *testing.T) {
	t.Parallel()
	short := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(short, []byte("short\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{short, short + ".missing"} {
		cfg := edge.DefaultConfig()
		cfg.Addr, cfg.DataDir, cfg.SecretFile = "127.0.0.1:0", t.TempDir(), file
		if _, err := edge.New(cfg, edge.Deps{Bus: bustest.Start(t).Bus(t), Store: memstore.New(nil), Registry: newRegistry()}); err == nil {
			t.Errorf("%s is taken", file)
		}
	}
}

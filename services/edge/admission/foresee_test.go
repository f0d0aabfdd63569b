package admission_test

import (
	"context"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// foresee asks what would become of bob's request.
func (r *rig) foresee(t *testing.T, path string) admission.Prospect {
	t.Helper()
	p, err := r.Foresee(context.Background(), admission.Request{
		Method: "GET", Path: path, Header: http.Header{"X-Api-Key": {"bob"}}, Peer: netip.MustParseAddr("192.0.2.1"),
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// What is foreseen comes true, to the microsecond for a token bucket, and costs nothing.
func TestForesee(t *testing.T) {
	t.Parallel()
	r := newRig(t, doc(`
  r: {path: /r, upstream: up, capacity: 5, refill_rate: 2, cost: 2, degrade: off}
  w: {path: /w, upstream: up, algorithm: sliding_window, sliding_limit: 4, window_seconds: 10, degrade: off}
  free: {path: /free, upstream: up}
  big: {path: /big, upstream: up, capacity: 5, refill_rate: 2, cost: 6}
  deny: {path: /deny, upstream: up, deny: true}
`))
	if p := r.foresee(t, "/r"); p.Action != admission.Forward || p.Wait != 0 || p.Each != time.Second || p.Client.ID != "user:bob" {
		t.Errorf("full: %+v", p)
	}
	for range 2 {
		r.ask("/r", "bob")
	}
	for range 10 { // it charges nothing, nor does it move the clock
		if p := r.foresee(t, "/r"); p.Wait != 500*time.Millisecond {
			t.Fatalf("one token left: %v", p.Wait)
		}
	}
	r.wait(499_999 * time.Microsecond)
	if d := r.ask("/r", "bob"); d.Action != admission.Deny {
		t.Errorf("before its time: %v", d.Action)
	}
	r.wait(time.Microsecond)
	if d := r.ask("/r", "bob"); d.Action != admission.Forward || r.foresee(t, "/r").Wait != time.Second {
		t.Errorf("at its time: %v", d.Action)
	}

	for range 4 {
		r.ask("/w", "bob")
	}
	waited := time.Duration(0)
	for {
		p := r.foresee(t, "/w")
		if p.Wait == 0 {
			break
		}
		waited += p.Wait
		r.wait(p.Wait)
		if waited > 30*time.Second {
			t.Fatal("the window never has room")
		}
	}
	if d := r.ask("/w", "bob"); d.Action != admission.Forward {
		t.Errorf("window: %v", d.Action)
	}

	if p := r.foresee(t, "/free"); p.Wait != 0 || p.Action != admission.Forward {
		t.Errorf("no limit: %+v", p)
	}
	if p := r.foresee(t, "/big"); p.Action != admission.DenyCost {
		t.Errorf("never: %+v", p)
	}
	if p := r.foresee(t, "/deny"); p.Action != admission.Forbid {
		t.Errorf("closed route: %+v", p)
	}
	r.store.fail = store.ErrUnavailable
	if _, err := r.Foresee(context.Background(), admission.Request{Method: "GET", Path: "/r", Header: http.Header{}}); err == nil {
		t.Error("no store: foreseen all the same")
	}
}

package admission_test

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// BenchmarkDecide is a whole decision, identity to charges, on a store in memory.
func BenchmarkDecide(b *testing.B) {
	engine := func(b *testing.B) *rig {
		r := newRig(b, doc(`  r: {path: /api/r, upstream: up, capacity: 1000000, refill_rate: 1000000}`))
		r.Store = memstore.New(nil)
		r.Clock = admission.NewStoreClock(time.Now)
		return r
	}
	for name, header := range map[string]http.Header{"address": headers(), "key": headers("X-API-Key", "bob"), "key-plan-day": headers("X-API-Key", "alice")} {
		b.Run("client="+name, func(b *testing.B) {
			r := engine(b)
			req := admission.Request{Method: "GET", Host: "edge.test", Path: "/api/r", Header: header, Peer: netip.MustParseAddr("192.0.2.1")}
			b.ReportAllocs()
			for b.Loop() {
				r.Decide(context.Background(), req)
			}
		})
	}
	b.Run("parallel", func(b *testing.B) {
		r := engine(b)
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for i := 0; pb.Next(); i++ {
				peer := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
				r.Decide(context.Background(), admission.Request{Method: "GET", Host: "edge.test", Path: "/api/r", Header: headers(), Peer: peer})
			}
		})
	})
}

// BenchmarkEncodeBatch is what a full batch of events costs the publisher.
func BenchmarkEncodeBatch(b *testing.B) {
	r := newRig(b, doc(`  r: {path: /r, upstream: up, capacity: 1000000, refill_rate: 1}`))
	for i := range 256 {
		r.Finish(r.ask("/r", "bob"), admission.Facts{ID: fmt.Sprint("request", i), Status: 200, Latency: time.Millisecond, Duration: time.Millisecond, Outcome: "ok"})
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := admission.EncodeBatch("edge", "boot", 1, r.records); err != nil {
			b.Fatal(err)
		}
	}
}

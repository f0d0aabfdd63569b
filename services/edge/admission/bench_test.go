package admission_test

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"runtime"
	"syscall"
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

// BenchmarkMemory is a whole decision that asks no store: a lease hit and a remembered denial, by address and by
// key, and a hot key from all cores at once (run with -cpu 1,2,8).
func BenchmarkMemory(b *testing.B) {
	start := func(b *testing.B, route string) *rig {
		r := newRig(b, doc("  r: {path: /api/r, upstream: up, degrade: off, "+route+"}"))
		r.Store = memstore.New(nil)
		r.Clock = admission.NewStoreClock(time.Now)
		r.Memory = admission.NewMemory(admission.DefaultMemory)
		r.Memory.Echo(1<<60, false) // heard of everything, for ever
		return r
	}
	request := func(header http.Header) admission.Request {
		return admission.Request{Method: "GET", Host: "edge.test", Path: "/api/r", Header: header, Peer: netip.MustParseAddr("192.0.2.1")}
	}
	const plenty, little = "capacity: 100000000, refill_rate: 100000000", "capacity: 1, refill_rate: 0.000001"
	for name, route := range map[string]string{"lease": plenty, "denial": little} {
		for client, header := range map[string]http.Header{"address": headers(), "key": headers("X-API-Key", "bob")} {
			b.Run(name+"/client="+client, func(b *testing.B) {
				r, req := start(b, route), request(header)
				b.ReportAllocs()
				before := cpuTime(b)
				for b.Loop() {
					r.Decide(context.Background(), req)
				}
				b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
				st := r.Memory.Stats()
				b.ReportMetric(float64(st.LeaseHits+st.Denials)/float64(b.N), "hits/op")
			})
		}
	}
	b.Run("lease/hot", func(b *testing.B) {
		r, req := start(b, plenty), request(headers())
		b.ReportAllocs()
		before := cpuTime(b)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				r.Decide(context.Background(), req)
			}
		})
		b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
	})
}

// BenchmarkMemoryBytes is what a client costs that is remembered: refused for an hour, and what one costs of whom
// there is nothing to remember. (What is kept for when the store is away is bounded by itself, and left out.)
func BenchmarkMemoryBytes(b *testing.B) {
	for name, red := range map[string]bool{"denied": true, "idle": false} {
		b.Run(name, func(b *testing.B) {
			r := newRig(b, doc(tight))
			r.Store, r.Memory = stub{red: red}, admission.NewMemory(admission.DefaultMemory)
			r.Local = memstore.New(r.now.Load, memstore.AtMost(64))
			const clients = admission.DefaultMemory / 2
			before := heapBytes()
			for i := range clients {
				askFrom(r.Engine, netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}))
			}
			grown := float64(int64(heapBytes()) - int64(before))
			for b.Loop() {
			}
			b.ReportMetric(grown/clients, "B/client")
			runtime.KeepAlive(r)
		})
	}
}

// cpuTime is the processor time that this process has used: unlike the time, it does not depend on what else runs.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func heapBytes() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
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

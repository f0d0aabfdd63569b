package proxy_test

import (
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/framing"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// BenchmarkProxy compares the edge, limits in memory and events dropped, with a bare
// ReverseProxy between the same client and upstream, and with itself where the framing of requests is
// not checked. The differences are what the edge adds, and what that check does.
func BenchmarkProxy(b *testing.B) {
	backend := upstream(b, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") })
	b.Run("plane=bare", func(b *testing.B) {
		target, err := url.Parse(backend)
		if err != nil {
			b.Fatal(err)
		}
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		s := &http.Server{Handler: &httputil.ReverseProxy{
			Rewrite:    func(pr *httputil.ProxyRequest) { pr.SetURL(target); pr.SetXForwarded() },
			Transport:  &http.Transport{MaxIdleConnsPerHost: 512},
			BufferPool: &pool{},
		}}
		go s.Serve(ln)
		defer s.Close()
		ask(b, "http://"+ln.Addr().String()+"/api")
	})
	for plane, serve := range map[string]func(*http.Server, net.Listener) error{"unframed": (*http.Server).Serve, "edge": framing.Serve} {
		b.Run("plane="+plane, func(b *testing.B) {
			r := newRig(b, rigConfig{policy: policyFor(backend, "capacity: 1000000", "refill_rate: 1000000"), serve: serve})
			r.engine.Sink = nowhere{}
			ask(b, r.url+"/api")
		})
	}
}

// pool lends out the copy buffers, as the edge's does.
type pool struct{ sync.Pool }

func (p *pool) Get() []byte {
	if buf, ok := p.Pool.Get().(*[]byte); ok {
		return *buf
	}
	return make([]byte, 32<<10)
}

func (p *pool) Put(buf []byte) { p.Pool.Put(&buf) }

type nowhere struct{}

func (nowhere) Add(admission.Record) bool { return true }

func ask(b *testing.B, url string) {
	c := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 512}}
	defer c.CloseIdleConnections()
	b.ReportAllocs()
	b.SetParallelism(8)
	before := cpu(b)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			res, err := c.Get(url)
			if err != nil {
				b.Error(err)
				return
			}
			io.Copy(io.Discard, res.Body)
			res.Body.Close()
			if res.StatusCode != 200 {
				b.Errorf("status %d", res.StatusCode)
				return
			}
		}
	})
	// Client and upstream included; unlike the time, it does not depend on how busy the machine is.
	b.ReportMetric(float64((cpu(b)-before).Microseconds())/float64(b.N), "cpu-µs/op")
}

// cpu is the processor time that this process has used.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

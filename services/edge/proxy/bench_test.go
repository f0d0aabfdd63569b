package proxy_test

import (
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/framing"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
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
			get(b, c, url)
		}
	})
	// Client and upstream included; unlike the time, it does not depend on how busy the machine is.
	b.ReportMetric(float64((cpu(b)-before).Microseconds())/float64(b.N), "cpu-µs/op")
}

func get(b *testing.B, c *http.Client, url string) {
	res, err := c.Get(url)
	if err != nil {
		b.Error(err)
		return
	}
	io.Copy(io.Discard, res.Body)
	res.Body.Close()
	if res.StatusCode != 200 {
		b.Errorf("status %d", res.StatusCode)
	}
}

// cpu is the processor time that this process has used.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkProxyPairs is the edge as it runs, leases on, against a bare ReverseProxy with the same transport, buffers, server and
// GOGC: pairs of turns, and the median of what the edge costs of the bare one's processor time (client and upstream
// included in both).
func BenchmarkProxyPairs(b *testing.B) {
	const turn = 1000 // requests
	backend := upstream(b, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") })
	target, err := url.Parse(backend)
	if err != nil {
		b.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	// The settings are those of newTransport.
	dialer := &net.Dialer{Timeout: 5 * time.Second, KeepAlive: 30 * time.Second}
	bare := telemetry.NewHTTPServer(&httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) { pr.SetURL(target); pr.SetXForwarded() },
		Transport: &http.Transport{
			DialContext: dialer.DialContext, ForceAttemptHTTP2: true, DisableCompression: true, MaxConnsPerHost: 4096, MaxIdleConnsPerHost: 512,
			IdleConnTimeout: 90 * time.Second, TLSHandshakeTimeout: 5 * time.Second, ExpectContinueTimeout: time.Second, MaxResponseHeaderBytes: 64 << 10,
		},
		BufferPool: &pool{},
	}, zerolog.Nop())
	go bare.Serve(ln)
	b.Cleanup(func() { bare.Close() })
	r := newRig(b, rigConfig{policy: policyFor(backend, "capacity: 100000000", "refill_rate: 100000000")})
	r.engine.Sink = nowhere{}
	r.engine.Memory = admission.NewMemory(admission.DefaultMemory)
	c := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 512}}
	defer c.CloseIdleConnections()
	cost := func(url string) float64 {
		before := cpu(b)
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				for range turn / 16 {
					get(b, c, url)
				}
			})
		}
		wg.Wait()
		return float64((cpu(b) - before).Microseconds()) / (turn / 16 * 16)
	}
	theirs, ours := "http://"+ln.Addr().String()+"/api", r.url+"/api"
	cost(theirs)
	cost(ours)
	var ratios, bares, edges []float64
	for n := 0; b.Loop(); n++ {
		var x, y float64
		if n%2 == 0 {
			x, y = cost(theirs), cost(ours)
		} else {
			y, x = cost(ours), cost(theirs)
		}
		ratios, bares, edges = append(ratios, y/x), append(bares, x), append(edges, y)
	}
	for name, values := range map[string][]float64{"edge/bare": ratios, "bare-cpu-µs": bares, "edge-cpu-µs": edges} {
		slices.Sort(values)
		b.ReportMetric(values[len(values)/2], name)
	}
	slices.Sort(ratios)
	b.ReportMetric(ratios[len(ratios)/4], "q1")
	b.ReportMetric(ratios[len(ratios)*3/4], "q3")
}

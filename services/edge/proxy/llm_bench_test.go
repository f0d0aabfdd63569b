package proxy_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/ratelimiter"
	"github.com/aegisrate/aegisrate/services/edge/llm"
)

// bare is a ReverseProxy as it comes, streaming: what the edge's streams are compared with.
func bare(b *testing.B, backend string) string {
	b.Helper()
	target, err := url.Parse(backend)
	if err != nil {
		b.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	p := &httputil.ReverseProxy{
		Rewrite:       func(pr *httputil.ProxyRequest) { pr.SetURL(target); pr.SetXForwarded() },
		Transport:     &http.Transport{MaxIdleConnsPerHost: 512, DisableCompression: true},
		FlushInterval: -1,
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex() // else a stream may end with the request's body
		p.ServeHTTP(w, r)
	})}
	go s.Serve(ln)
	b.Cleanup(func() { s.Close() })
	return "http://" + ln.Addr().String()
}

// llmRig is an edge whose LLM quotas are counted in a Redis of its own.
func llmRig(b *testing.B, backend string) string {
	b.Helper()
	doc := strings.Replace(llmPolicy(backend, "rpm: 1000000000, tpm: 1000000000"), "timeout_seconds: 5", "max_connections: 20000", 1)
	r := newRig(b, rigConfig{policy: doc})
	r.engine.Sink = nowhere{}
	client := redistest.Start(b).Client
	counters, err := llm.NewCounters(func(name string, window time.Duration) (ratelimiter.Counter, error) {
		return ratelimiter.NewRedis(name, client, window)
	})
	if err != nil {
		b.Fatal(err)
	}
	r.llm.Shared, r.llm.Now = counters, time.Now
	return r.url
}

// BenchmarkLLMStream sends a stream of 50 events through a bare ReverseProxy and through the edge, in turns. The
// edge counts in Redis, asks for usage and takes it out. It tells the medians of the time to
// the first event and of the time that an event is under way, and what the edge adds to them.
func BenchmarkLLMStream(b *testing.B) {
	const chunks = 50
	backend := upstream(b, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		for range chunks {
			fmt.Fprintf(w, "data: {\"at\":%d,\"choices\":[{\"delta\":{\"content\":\"word\"}}],\"usage\":null}\n\n", time.Now().UnixNano())
			http.NewResponseController(w).Flush()
			time.Sleep(200 * time.Microsecond)
		}
		io.WriteString(w, usage+done)
	})
	planes := map[string]string{"bare": bare(b, backend), "edge": llmRig(b, backend)}
	c := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}
	defer c.CloseIdleConnections()
	first, under := map[string][]float64{}, map[string][]float64{}
	one := func(plane string) {
		req, err := http.NewRequest(http.MethodPost, planes[plane]+"/v1/chat/completions", strings.NewReader(callStream))
		if err != nil {
			b.Fatal(err)
		}
		req.Header.Set("X-API-Key", "alice")
		began := time.Now()
		res, err := c.Do(req)
		if err != nil {
			b.Fatal(err)
		}
		defer res.Body.Close()
		lines := bufio.NewReader(res.Body)
		for n := 0; ; {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				if n != chunks {
					b.Fatalf("%s: %d chunks: %v", plane, n, err)
				}
				return
			}
			now := time.Now()
			at, ok := bytes.CutPrefix(line, []byte(`data: {"at":`))
			if !ok {
				continue
			}
			if n++; n == 1 {
				first[plane] = append(first[plane], float64(now.Sub(began).Nanoseconds())/1000)
			}
			sent, err := strconv.ParseInt(string(at[:bytes.IndexByte(at, ',')]), 10, 64)
			if err != nil {
				b.Fatal(err)
			}
			under[plane] = append(under[plane], float64(now.UnixNano()-sent)/1000)
		}
	}
	for b.Loop() {
		one("bare")
		one("edge")
	}
	median := func(of []float64) float64 { slices.Sort(of); return of[len(of)/2] }
	for _, m := range []struct {
		name string
		of   map[string][]float64
	}{{"first", first}, {"chunk", under}} {
		without, with := median(m.of["bare"]), median(m.of["edge"])
		b.ReportMetric(without, "bare-"+m.name+"-µs")
		b.ReportMetric(with, "edge-"+m.name+"-µs")
		b.ReportMetric(with-without, "added-"+m.name+"-µs")
	}
}

const (
	openStreams = 5000
	// childOf tells a copy of this program that it is the outside of the proxy under test.
	childOf = "AEGIS_TEST_STREAMS_OUTSIDE"
)

func TestMain(m *testing.M) {
	if os.Getenv(childOf) != "" {
		if err := outside(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// BenchmarkLLMOpenStreams holds 5,000 streams open whose upstream and clients are another process, and tells what each
// takes of this one: heap and stacks after a collection, and resident memory.
func BenchmarkLLMOpenStreams(b *testing.B) {
	for name, plane := range map[string]func(*testing.B, string) string{"plane=bare": bare, "plane=edge": llmRig} {
		b.Run(name, func(b *testing.B) {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), childOf+"=1")
			cmd.Stderr = os.Stderr
			in, err := cmd.StdinPipe()
			if err != nil {
				b.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				b.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() {
				in.Close()
				cmd.Wait()
			})
			lines := bufio.NewScanner(out)
			lines.Scan()
			target := plane(b, lines.Text())
			b.ResetTimer()
			heap, resident := memory(b)
			fmt.Fprintln(in, target)
			if lines.Scan(); lines.Text() != "open" {
				b.Fatalf("the streams did not open: %q", lines.Text())
			}
			heapNow, residentNow := memory(b)
			b.ReportMetric(float64(heapNow-heap)/openStreams/1024, "KiB-heap/stream")
			b.ReportMetric(float64(residentNow-resident)/openStreams/1024, "KiB-rss/stream")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// memory is what this process uses: heap and stacks, and resident, in bytes.
func memory(b *testing.B) (heap, resident int64) {
	b.Helper()
	runtime.GC()
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		b.Fatal(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(statm))[1], 10, 64)
	if err != nil {
		b.Fatal(err)
	}
	return int64(m.HeapAlloc + m.StackInuse), pages * int64(os.Getpagesize())
}

// outside is an upstream whose streams stay open after an event, and the clients that hold them. It says where the
// upstream is, reads where to send, says "open" once each stream has had its event, and ends with its input.
func outside(in io.Reader, out io.Writer) error {
	end := make(chan struct{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go http.Serve(ln, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, word)
		http.NewResponseController(w).Flush()
		<-end
	}))
	fmt.Fprintf(out, "http://%s\n", ln.Addr())
	lines := bufio.NewScanner(in)
	lines.Scan()
	target := lines.Text()
	var wg sync.WaitGroup
	errs := make(chan error, openStreams)
	dialling := make(chan struct{}, 64)
	for range openStreams {
		wg.Go(func() {
			dialling <- struct{}{}
			defer func() { <-dialling }()
			errs <- openStream(target)
		})
	}
	wg.Wait()
	for range openStreams {
		if err := <-errs; err != nil {
			return err
		}
	}
	fmt.Fprintln(out, "open")
	lines.Scan()
	close(end)
	return nil
}

// openStream makes a call and leaves its stream open.
func openStream(target string) error {
	conn, err := net.Dial("tcp", strings.TrimPrefix(target, "http://"))
	if err != nil {
		return err
	}
	fmt.Fprintf(conn, "POST /v1 HTTP/1.1\r\nHost: x\r\nX-API-Key: alice\r\nContent-Length: %d\r\n\r\n%s", len(callStream), callStream)
	seen := make([]byte, 0, 4096)
	for !bytes.Contains(seen, []byte("word")) {
		n, err := conn.Read(seen[len(seen):cap(seen)])
		if err != nil {
			return fmt.Errorf("%w after %q", err, seen)
		}
		seen = seen[:len(seen)+n]
	}
	return nil
}

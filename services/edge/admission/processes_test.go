package admission_test

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/internal/history"
	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redisstore"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// envProcess makes this test binary an edge's process: the JSON of a process.
const envProcess = "AEGIS_TEST_EDGE_PROCESS"

func TestMain(m *testing.M) {
	if text := os.Getenv(envProcess); text != "" {
		if err := runProcess(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	m.Run()
}

// process is what one edge of a fleet is told.
type process struct {
	Redis, Policy string
	Edge, Edges   int
	Rate          float64       // requests a second
	For           time.Duration // how long
	Apart         bool          // the planted bug: a bucket of its own
}

// happening is what an edge's process writes down, by Redis' time in microseconds: exact where Redis decided; of what
// the edge decided, by its estimate of Redis' clock, which is slow by no more than Late.
type happening struct {
	// Kind is "admitted", "denied", "granted" or "returned".
	Kind string
	At   int64
	Late int64
	// Tokens were granted or returned; a request is Leased where it was paid for so.
	Tokens int64
	Leased bool
	Edge   int
}

// runProcess is an edge: the real engine on the real store, asked at its own pace.
func runProcess(text string) error {
	var p process
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return err
	}
	redis, err := redisstore.New(redisstore.Options{Addrs: []string{p.Redis}, Timeout: 5 * time.Second, PoolSize: 4})
	if err != nil {
		return err
	}
	defer redis.Close()
	clock := admission.NewStoreClock(time.Now)
	w := &witness{Store: redis, clock: clock, out: json.NewEncoder(os.Stdout), edge: p.Edge}
	e := &admission.Engine{
		Identifier:  admission.Identifier{IPv6Bits: 64},
		Store:       w,
		Local:       memstore.New(clock.Micros),
		Clock:       clock,
		Breaker:     admission.NewBreaker(time.Now, nil),
		Fleet:       admission.NewFleet(fmt.Sprint(p.Edge)),
		Multipliers: admission.NewMultipliers(time.Now),
		Memory:      admission.NewMemory(admission.DefaultMemory),
		Sink:        w,
	}
	if p.Apart {
		w.Store = memstore.New(nil)
	}
	for i := range p.Edges {
		e.Fleet.Heard(fmt.Sprint(i), false, time.Now())
	}
	table, err := compilePolicy(p.Policy)
	if err != nil {
		return err
	}
	e.Use(table)
	rng := rand.New(rand.NewPCG(uint64(p.Edge), 1))
	tend := time.NewTicker(admission.TendInterval)
	defer tend.Stop()
	begun := time.Now()
	for next := begun; next.Sub(begun) < p.For; {
		select {
		case <-tend.C:
			e.Tend(context.Background())
			continue
		case <-time.After(time.Until(next)):
		}
		next = next.Add(time.Duration((0.5 + rng.Float64()) / p.Rate * 1e9))
		if now := time.Now(); next.Before(now) { // a stalled machine: no burst to make up for it
			next = now
		}
		asked := clock.Elapsed()
		d := askFrom(e, netip.MustParseAddr("192.0.2.1"))
		if !d.Leased() && !d.Degraded {
			w.late = max(w.late, clock.Elapsed()-asked)
		}
		switch {
		case d.Degraded:
			return errors.New("decided without Redis")
		case d.Action == admission.Forward:
			w.leased = d.Leased()
			e.Finish(d, admission.Facts{ID: "x", Status: 200, Outcome: "ok"})
		default:
			w.write(happening{Kind: "denied", At: clock.Micros(), Late: w.late})
		}
	}
	e.Release(context.Background())
	return w.err
}

// witness is a process's store and sink: it writes down what happens.
type witness struct {
	store.Store
	clock  *admission.StoreClock
	out    *json.Encoder
	edge   int
	leased bool
	// late is the longest that Redis took to answer: so much may its clock be ahead of what we take it for.
	late int64
	err  error
}

func (w *witness) write(h happening) {
	h.Edge = w.edge
	w.err = cmp.Or(w.err, w.out.Encode(h))
}

func (w *witness) Add(r admission.Record) bool {
	h := happening{Kind: "admitted", At: r.Response.Time, Leased: w.leased}
	if w.leased {
		h.Late = w.late
	}
	w.write(h)
	return true
}

func (w *witness) Check(ctx context.Context, c store.Check) (store.Decision, error) {
	d, err := w.Store.Check(ctx, c)
	if err == nil && d.Granted > 0 {
		w.write(happening{Kind: "granted", At: d.Now, Tokens: d.Granted / bucket.One})
	}
	return d, err
}

func (w *witness) Return(ctx context.Context, r store.Return) error {
	err := w.Store.Return(ctx, r)
	w.write(happening{Kind: "returned", At: w.clock.Micros(), Late: w.late, Tokens: r.Amount / bucket.One})
	return err
}

// fleetOf runs an edge's process for each share of a load, at twice the limit, and tells what happened, in order.
func fleetOf(t *testing.T, capacity int64, rate float64, shares []float64, lasts time.Duration, apart bool) []happening {
	t.Helper()
	server := redistest.Start(t)
	total := 0.0
	for _, x := range shares {
		total += x
	}
	var (
		mu  sync.Mutex
		all []happening
		wg  sync.WaitGroup
	)
	for i, x := range shares {
		spec, err := json.Marshal(process{
			Redis: server.Addr, Policy: limitDoc(capacity, rate, ""), Edge: i, Edges: len(shares), Rate: 2 * rate * x / total, For: lasts, Apart: apart,
		})
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), envProcess+"="+string(spec))
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			lines := bufio.NewScanner(out)
			for lines.Scan() {
				var h happening
				if err := json.Unmarshal(lines.Bytes(), &h); err != nil {
					t.Errorf("edge %d: %v", i, err)
				}
				mu.Lock()
				all = append(all, h)
				mu.Unlock()
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("edge %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	slices.SortStableFunc(all, func(a, b happening) int { return cmp.Compare(a.At, b.At) })
	return all
}

// judged is what a fleet's happenings come to.
type judged struct {
	admitted []history.Request
	limit    history.Limit
	share    float64 // of C + R·t, that was admitted
	ideal    float64 // the same of a bucket alone, asked the same
	late     time.Duration
	starved  time.Duration
}

func judge(all []happening, capacity int64, rate float64) judged {
	var (
		j      = judged{limit: history.Limit{Capacity: capacity, Rate: rate}}
		first  = all[0].At
		steps  []step
		out    int64
		served = map[int]int64{}
		tokens = float64(capacity)
		ideal  = 0
		last   = first
	)
	for _, h := range all {
		at := h.At - first
		j.late = max(j.late, time.Duration(h.Late)*time.Microsecond)
		switch h.Kind {
		case "granted":
			steps, out = append(steps, step{h.At, h.Tokens}), out+h.Tokens
			continue
		case "returned": // leased until it surely was back
			steps, out = append(steps, step{h.At + h.Late, -h.Tokens}), out-h.Tokens
			continue
		case "admitted":
			j.admitted = append(j.admitted, history.Request{
				Start: time.Duration(at) * time.Microsecond, End: time.Duration(at+h.Late) * time.Microsecond, Cost: 1})
			if h.Leased {
				steps, out = append(steps, step{h.At + h.Late, -1}), out-1
			}
			served[h.Edge] = h.At
		case "denied":
			if _, seen := served[h.Edge]; !seen || out == 0 {
				served[h.Edge] = h.At
			}
			j.starved = max(j.starved, time.Duration(h.At-served[h.Edge])*time.Microsecond)
		}
		tokens = min(float64(capacity), tokens+float64(h.At-last)*rate/1e6)
		if last = h.At; tokens >= 1 {
			tokens--
			ideal++
		}
	}
	full := float64(capacity) + rate*float64(last-first)/1e6
	j.share, j.ideal = float64(len(j.admitted))/full, float64(ideal)/full
	j.limit.Leased = leasedOf(steps, first)
	return j
}

// Four edges as processes of their own on a real Redis, at twice the limit: what they admit together is what one
// bucket would, within the bound in every interval, by Redis' time.
func TestFleetOfProcesses(t *testing.T) {
	t.Parallel()
	for _, shape := range []struct {
		capacity int64
		rate     float64
		shares   []float64
	}{{20, 10, []float64{10, 5, 2, 1}}, {300, 60, []float64{1, 1, 1, 1}}} {
		t.Run(fmt.Sprintf("C=%d,R=%g", shape.capacity, shape.rate), func(t *testing.T) {
			t.Parallel()
			processes(t, shape.capacity, shape.rate, shape.shares, 8*time.Second, 0.95)
		})
	}
}

// processes judges a fleet; least is the share of a bucket alone that it must admit.
func processes(t *testing.T, capacity int64, rate float64, shares []float64, lasts time.Duration, least float64) {
	j := judge(fleetOf(t, capacity, rate, shares, lasts, false), capacity, rate)
	t.Logf("%d admitted: %.2f %% of C + R·t, a bucket alone %.2f %%; the edges' estimate of Redis' clock is within %v; without at the most %v",
		len(j.admitted), 100*j.share, 100*j.ideal, j.late, j.starved)
	if j.share > 1 || j.share < least*min(1, j.ideal) {
		t.Errorf("%.2f %% of C + R·t admitted, %.2f %% by a bucket alone", 100*j.share, 100*j.ideal)
	}
	if err := history.Check(j.admitted, j.limit); err != nil {
		t.Error(err)
	}
	if j.starved > 2*time.Second {
		t.Errorf("an edge went without for %v while tokens were leased elsewhere", j.starved)
	}
}

// Processes that each count for themselves are caught.
func TestFleetOfProcessesApartIsCaught(t *testing.T) {
	t.Parallel()
	j := judge(fleetOf(t, 20, 10, []float64{1, 1, 1, 1}, 3*time.Second, true), 20, 10)
	var v *history.Violation
	if err := history.Check(j.admitted, j.limit); !errors.As(err, &v) {
		t.Errorf("got %v, want a violation", err)
	}
}

package history_test

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/internal/history"
)

var limit = history.Limit{Capacity: 20, Rate: 10}

// bucket is the simplest limiter: continuous refill, no rounding.
type bucket struct {
	tokens float64
	last   time.Duration
}

func (b *bucket) admit(now time.Duration, cost float64, l history.Limit) bool {
	b.tokens = min(float64(l.Capacity), b.tokens+(now-b.last).Seconds()*l.Rate)
	b.last = now
	if b.tokens < cost {
		return false
	}
	b.tokens -= cost
	return true
}

// simulate sends a request every few milliseconds for ten seconds; edge picks the bucket
// that decides it. Requests take up to 40 ms, and the decision falls anywhere in between.
func simulate(rng *rand.Rand, buckets int, l history.Limit) []history.Request {
	fleet := make([]bucket, buckets)
	for i := range fleet {
		fleet[i].tokens = float64(l.Capacity)
	}
	var admitted []history.Request
	for now := time.Duration(0); now < 10*time.Second; now += time.Duration(rng.IntN(int(10 * time.Millisecond))) {
		r := history.Request{
			Start: now - time.Duration(rng.IntN(int(20*time.Millisecond))),
			End:   now + time.Duration(rng.IntN(int(20*time.Millisecond))),
			Cost:  1 + rng.Int64N(3),
		}
		if fleet[rng.IntN(buckets)].admit(now, float64(r.Cost), l) {
			admitted = append(admitted, r)
		}
	}
	rng.Shuffle(len(admitted), func(i, j int) { admitted[i], admitted[j] = admitted[j], admitted[i] })
	return admitted
}

func TestSharedBucketPasses(t *testing.T) {
	t.Parallel()
	for seed := range uint64(30) {
		if err := history.Check(simulate(rand.New(rand.NewPCG(seed, 1)), 1, limit), limit); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
	}
}

// What the checker is for: three edges that each count for themselves.
func TestCountingPerEdgeIsCaught(t *testing.T) {
	t.Parallel()
	for seed := range uint64(30) {
		var v *history.Violation
		if err := history.Check(simulate(rand.New(rand.NewPCG(seed, 2)), 3, limit), limit); !errors.As(err, &v) {
			t.Fatalf("seed %d: %v, want a violation", seed, err)
		}
		if float64(v.Admitted) < 1.5*v.Allowed {
			t.Errorf("seed %d: %v: not the worst interval of three buckets", seed, v)
		}
	}
}

// Faults that a total over the whole run would not show.
func TestLocalExcessIsCaught(t *testing.T) {
	t.Parallel()
	at := func(ms ...int) (h []history.Request) {
		for _, m := range ms {
			d := time.Duration(m) * time.Millisecond
			h = append(h, history.Request{Start: d, End: d + time.Millisecond, Cost: 1})
		}
		return h
	}
	cases := map[string]struct {
		history []history.Request
		limit   history.Limit
		broken  bool
	}{
		"nothing":                  {nil, history.Limit{Capacity: 1, Rate: 1}, false},
		"the burst itself":         {at(0, 0, 0), history.Limit{Capacity: 3, Rate: 1}, false},
		"one above the burst":      {at(0, 0, 0, 0), history.Limit{Capacity: 3, Rate: 1}, true},
		"a second burst too early": {at(0, 0, 0, 9000, 9000, 10000, 10000, 10000), history.Limit{Capacity: 3, Rate: 1}, true},
		"a second burst in time":   {at(0, 0, 0, 9000, 9000, 9000), history.Limit{Capacity: 3, Rate: 1}, false},
		"a long answer hides when": {
			[]history.Request{{Start: 0, End: 2 * time.Second, Cost: 3}, {Start: time.Second, End: time.Second, Cost: 3}},
			history.Limit{Capacity: 3, Rate: 1.5}, false,
		},
		"spent from a lease": {
			at(0, 0, 0, 9000, 9000, 9000, 9000, 9000), history.Limit{Capacity: 3, Rate: 1, Leased: func(at time.Duration) int64 { return 2 * int64(at/(9*time.Second)) }}, false,
		},
		"more than was leased": {
			at(0, 0, 0, 9000, 9000, 9000, 9000, 9000), history.Limit{Capacity: 3, Rate: 1, Leased: func(time.Duration) int64 { return 1 }}, true,
		},
		"cost counts": {
			[]history.Request{{Cost: 3}, {Cost: 1}},
			history.Limit{Capacity: 3, Rate: 1}, true,
		},
	}
	for name, c := range cases {
		if err := history.Check(c.history, c.limit); (err != nil) != c.broken {
			t.Errorf("%s: got %v, want broken %v", name, err, c.broken)
		}
	}
}

// The dumb twin tries every start against every end and counts anew.
func TestAgreesWithTheDumbTwin(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(7, 7))
	broken := 0
	for range 2000 {
		l := history.Limit{Capacity: 1 + rng.Int64N(5), Rate: 0.5 + rng.Float64()*3}
		var h []history.Request
		for range rng.IntN(12) {
			start := time.Duration(rng.IntN(3000)) * time.Millisecond
			h = append(h, history.Request{Start: start, End: start + time.Duration(rng.IntN(500))*time.Millisecond, Cost: rng.Int64N(3)})
		}
		want := false
		for _, a := range h {
			for _, b := range h {
				sum := 0.0
				for _, r := range h {
					if r.Start >= a.Start && r.End <= b.End {
						sum += float64(r.Cost)
					}
				}
				want = want || b.End >= a.Start && sum > float64(l.Capacity)+l.Rate*(b.End-a.Start).Seconds()+1e-6
			}
		}
		if got := history.Check(h, l) != nil; got != want {
			t.Fatalf("got broken %v, want %v: %+v under %+v", got, want, h, l)
		}
		if want {
			broken++
		}
	}
	if broken < 200 || broken > 1800 {
		t.Errorf("%d of 2000 histories break their limit: the comparison says little", broken)
	}
}

func TestImpossibleHistoryIsRefused(t *testing.T) {
	t.Parallel()
	var v *history.Violation
	err := history.Check([]history.Request{{Start: 2, End: 1, Cost: 1}}, limit)
	if err == nil || errors.As(err, &v) {
		t.Errorf("got %v, want an error that is no violation", err)
	}
}

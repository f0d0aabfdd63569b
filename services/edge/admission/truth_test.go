package admission_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// unspent is a store that knows how many tokens are leased out, and the largest lease yet.
type unspent struct {
	store.Store
	leased, largest int64
}

func (u *unspent) Check(ctx context.Context, c store.Check) (store.Decision, error) {
	d, err := u.Store.Check(ctx, c)
	u.leased += d.Granted / bucket.One
	u.largest = max(u.largest, d.Granted/bucket.One)
	return d, err
}

func (u *unspent) Return(ctx context.Context, r store.Return) error {
	u.leased -= r.Amount / bucket.One
	return u.Store.Return(ctx, r)
}

// What a client is told under leases, by one edge of several, is never above what its next requests could get
// by more than a lease.
func TestRemainingUnderLeases(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		capacity   int64
		rate, load float64
		shares     []float64
	}{
		{20, 10, 20, []float64{1, 1, 1, 1}},
		{20, 10, 20, []float64{10, 5, 2, 1}},
		{400, 50, 100, []float64{1, 1, 1, 1}},
		{400, 50, 100, []float64{10, 5, 2, 1}},
		{1000, 500, 300, []float64{1, 1}},
		{10_000, 10, 200, []float64{1, 1, 1, 1}},
		{10_000, 10, 200, []float64{100, 5, 1, 1}},
	} {
		t.Run(fmt.Sprintf("C=%d,R=%g,%v", c.capacity, c.rate, c.shares), func(t *testing.T) {
			t.Parallel()
			s := newSim(t, len(c.shares), limitDoc(c.capacity, c.rate, ""), false)
			u := &unspent{Store: s.store.Store}
			peek := s.one
			peek.Client, peek.Cost = "ip:192.0.2.1", 0
			total, hits, worst := 0.0, 0, int64(0)
			for _, share := range c.shares {
				total += share
			}
			rng := rand.New(rand.NewPCG(1, 8))
			for i, e := range s.edges {
				e.Store = u
				pause := 1e6 / (c.load * c.shares[i] / total)
				s.every(int64(pause*(0.9+0.2*rng.Float64())), func() {
					d := e.Decide(context.Background(), admission.Request{Method: "GET", Path: "/r", Header: http.Header{}, Peer: netip.MustParseAddr("192.0.2.1")})
					if d.Action != admission.Forward || !d.Leased() {
						return
					}
					hits++
					u.leased--
					got, err := s.store.Store.Check(context.Background(), peek)
					if err != nil {
						t.Fatal(err)
					}
					worst = max(worst, d.Remaining-max(0, got.Limits[0].Remaining)/bucket.One-u.leased)
				})
			}
			s.run(60 * time.Second)
			t.Logf("%d told from memory, at the most %d too many; the largest lease is %d", hits, worst, u.largest)
			if hits == 0 || worst > max(u.largest, 2) {
				t.Error("that is more than a lease")
			}
		})
	}
}

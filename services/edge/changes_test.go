package edge_test

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge"
)

// counted is a store that counts checks.
type counted struct {
	store.Store
	checks atomic.Int64
}

func (c *counted) Check(ctx context.Context, check store.Check) (store.Decision, error) {
	c.checks.Add(1)
	return c.Store.Check(ctx, check)
}

const loopback = "ip:127.0.0.1"

func tell(t *testing.T, b *bus.Bus, changed events.ChangedBucket) {
	t.Helper()
	data, err := events.Encode(events.BucketsChanged{Buckets: []events.ChangedBucket{changed}})
	if err == nil {
		err = b.Send(events.SubjectChanged(store.ShardOf(changed.Client)), data)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// What is told of a bucket on NATS reaches what edges remember of it: denials that a refund has made false, leases
// of a client in debt. As long as it would, a denial costs no call; without NATS, one a second.
func TestChangedBuckets(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	b := server.Provisioned(t)
	st := &counted{Store: memstore.New(nil)}
	p := policyFor(t, backend(t), 4) // too small for grace
	publish(t, b, p)
	r := start(t, edge.Deps{Bus: server.Bus(t), Store: st})
	r.awaitVersion(1)
	bustest.Await(t, "a denial", func() bool { return r.get("/api").StatusCode == http.StatusTooManyRequests })
	bustest.Await(t, "a denial that is remembered for longer than a second, being heard of", func() bool {
		before := st.checks.Load()
		for begun := time.Now(); time.Since(begun) < 1500*time.Millisecond; time.Sleep(50 * time.Millisecond) {
			if r.get("/api").StatusCode != http.StatusTooManyRequests {
				t.Fatal("admitted")
			}
		}
		return st.checks.Load() == before
	})

	shard := store.ShardOf(loopback)
	if _, err := st.Begin(t.Context(), shard, "s", 0); err != nil {
		t.Fatal(err)
	}
	api := p.Routes["api"]
	refund := store.Settlement{Shard: shard, Stream: "s", Seq: 1, Boot: "b", N: 1, Items: []store.Item{{
		Client: loopback, Scope: "api", Delta: -bucket.One, Time: time.Now().UnixMicro(),
		Spec: bucket.Effective(bucket.Limit{Kind: bucket.TokenBucket, Capacity: api.Capacity, Rate: 1000}, bucket.One),
	}}}
	if _, err := st.Settle(t.Context(), refund); err != nil {
		t.Fatal(err)
	}
	tell(t, b, events.ChangedBucket{Client: loopback, Scope: "api", Why: events.ChangedGain})
	bustest.Await(t, "the refunded token", func() bool { return r.get("/api").StatusCode == http.StatusOK })

	server.Stop()
	time.Sleep(1200 * time.Millisecond) // until what was heard is too old
	bustest.Await(t, "Redis asked again without NATS", func() bool {
		before := st.checks.Load()
		r.get("/api")
		return st.checks.Load() > before
	})
}

// A lease goes back when its client is said to be in debt, and when the edge stops.
func TestLeasesGoBack(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	st := memstore.New(nil)
	publish(t, b, policyFor(t, backend(t), 10_000))
	r := start(t, edge.Deps{Bus: b, Store: st})
	r.awaitVersion(1)
	told := make(chan struct{}, 100)
	sub, err := b.Subscribe(events.SubjectChanged(store.ShardOf(loopback)), func(bus.Message) { told <- struct{}{} })
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Stop()
	asked := int64(0)
	lease := func() {
		t.Helper()
		bustest.Await(t, "a lease", func() bool { asked++; r.get("/api"); return r.metric("aegis_edge_leases") == 1 })
	}
	balance := func() int64 {
		s, _ := st.Bucket(bucket.TokenBucket, "api", loopback)
		return s.State.Token.Tokens / bucket.One
	}
	lease()
	if balance() >= 10_000-asked {
		t.Error("a lease that was not charged")
	}
	tell(t, b, events.ChangedBucket{Client: loopback, Scope: "api", Why: events.ChangedDebt})
	bustest.Await(t, "the lease's return", func() bool { return r.metric("aegis_edge_leases") == 0 && balance() == 10_000-asked })
	<-told // our own
	select {
	case <-told:
	case <-time.After(10 * time.Second):
		t.Error("the other edges are not told of a returned lease")
	}
	lease()
	r.stop()
	if got := balance(); got != 10_000-asked {
		t.Errorf("%d left after the edge stopped, want %d", got, 10_000-asked)
	}
}

package settler_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/settler"
)

// settled waits until a settler runs and has begun every shard: what is published
// before that is not its business.
func settled(t testing.TB, i *instance) {
	t.Helper()
	bustest.Await(t, "start of the settler", func() bool { return i.log.count("reading responses") > 0 })
	i.flush(t)
}

func TestSettles(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	s := memstore.New(nil)
	i := start(t, b, s, fast())
	settled(t, i)
	want := model{}
	p := newPublisher(t, b, "boot", want)
	for n := range 200 {
		p.send(n%20, n%7, n%7)
	}
	i.flush(t)
	want.check(t, s)
	if got := i.metric(t, "events_total", "header"); got != 600 {
		t.Errorf("%v events counted by header, want 600", got)
	}
	if _, err := i.Ready(t.Context()); err != nil {
		t.Errorf("not ready: %v", err)
	}
}

// Every kind of charge and outcome, through the whole path.
func TestDeltasReachBuckets(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	s := memstore.New(nil)
	i := start(t, b, s, fast())
	settled(t, i)
	p := newPublisher(t, b, "boot", model{})
	want := model{}
	for k, c := range []struct {
		cost    string
		how     events.How
		outcome events.Outcome
		taken   int64 // besides the base of 5
	}{
		{"12", events.HowRedis, events.OutcomeOK, 7},
		{"2", events.HowRedis, events.OutcomeOK, -3},
		{"12", events.HowUnknown, events.OutcomeOK, 7},
		{"12", events.HowLocal, events.OutcomeOK, 12},
		{"", events.HowLocal, events.OutcomeReset, 5},
		{"", events.HowRedis, events.OutcomeUnreached, -5},
		{"", events.HowUnknown, events.OutcomeUnreached, -5},
		{"", events.HowLocal, events.OutcomeUnreached, 0},
		{"NaN", events.HowRedis, events.OutcomeOK, 0},
		{"-5", events.HowRedis, events.OutcomeOK, 0},
		{"1e309", events.HowRedis, events.OutcomeOK, 0},
		{"1001", events.HowRedis, events.OutcomeOK, 0},
		{"", events.HowRedis, events.OutcomeTimeout, 0},
		{"", events.HowRedis, events.OutcomeAborted, 0},
		{"6", events.HowRedis, events.OutcomeAborted, 1},
	} {
		// The edge's part first: 50 tokens so that refunds have room, and the base.
		name := client(k)
		if _, err := s.Check(t.Context(), store.Check{Client: name, Cost: 50 * one, Limits: []store.Limit{
			{Scope: route, Spec: specs[0]}, {Scope: bucket.ScopeDay, Spec: specs[1]}}}); err != nil {
			t.Fatal(err)
		}
		e := event(fmt.Sprint(k), name, c.cost)
		e.Base, e.Outcome, e.Refund = 5*one, c.outcome, c.outcome == events.OutcomeUnreached
		for j := range e.Charges {
			e.Charges[j].Amount, e.Charges[j].How = 5*one, c.how
		}
		p.publish(p.encode(e), p.id())
		want[name] = (50 + c.taken) * one
	}
	i.flush(t)
	want.check(t, s)
	if got := i.metric(t, "invalid_costs_total", "malformed"); got != 3 {
		t.Errorf("%v malformed costs counted, want 3", got)
	}
	if got := i.metric(t, "invalid_costs_total", "above_max"); got != 1 {
		t.Errorf("%v costs above the maximum counted, want 1", got)
	}
}

// Edges are told whose buckets went below zero, and whose have got something back; of others nothing.
func TestTellsOfChangedBuckets(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	s := memstore.New(nil)
	told := make(chan events.ChangedBucket, 100)
	sub, err := b.Subscribe(events.AllChanged, func(m bus.Message) {
		c, err := events.Decode[events.BucketsChanged](m.Data)
		if err != nil || m.Subject != events.SubjectChanged(store.ShardOf(c.Buckets[0].Client)) {
			t.Errorf("%s: %v", m.Subject, err)
		}
		for _, one := range c.Buckets {
			told <- one
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Stop()
	i := start(t, b, s, fast())
	settled(t, i)
	p := newPublisher(t, b, "boot", model{})
	for k, c := range []struct{ spend, base, cost int64 }{{10 * one, 5 * one, 2}, {capacity, one, 3}, {10 * one, one, 3}} {
		if _, err := s.Check(t.Context(), store.Check{Client: client(k), Cost: c.spend, Limits: []store.Limit{{Scope: route, Spec: specs[0]}}}); err != nil {
			t.Fatal(err)
		}
		e := event(fmt.Sprint(k), client(k), fmt.Sprint(c.cost))
		e.Base, e.Charges = c.base, e.Charges[:1]
		e.Charges[0].Amount = c.base
		p.publish(p.encode(e), p.id())
	}
	i.flush(t)
	got := map[events.ChangedBucket]int{}
	for range 2 {
		select {
		case c := <-told:
			got[c]++
		case <-time.After(10 * time.Second):
			t.Fatal("edges are not told")
		}
	}
	if got[events.ChangedBucket{Client: client(0), Scope: route, Why: events.ChangedGain}] != 1 ||
		got[events.ChangedBucket{Client: client(1), Scope: route, Why: events.ChangedDebt}] != 1 || len(told) > 0 {
		t.Errorf("told %+v and %d more", got, len(told))
	}
}

// The settler was away for an hour of a client that overspends. What it then takes at once stops at
// max_debt, so that the client waits for that and not for the hour; the rest is forgiven, and counted.
// Who spent less pays all of it.
func TestMaxDebtAfterAnHourWithoutSettler(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	s := memstore.New(nil)
	first := start(t, b, s, fast())
	settled(t, first)
	first.stop()
	p := newPublisher(t, b, "boot", model{})
	const spends, modest = "user:spends", "user:modest"
	for range 36 { // an event a second
		var list []events.Response
		for k := range 100 {
			list = append(list, event(fmt.Sprint(p.n, k), spends, "20"))
		}
		list = append(list, event(fmt.Sprint(p.n), modest, "3"))
		p.publish(p.encode(list...), p.id())
	}
	i := start(t, b, s, fast())
	i.flush(t)
	for _, spec := range specs {
		if spec.MaxDebt != 10*capacity {
			t.Fatalf("the test wants a bound of %d", 10*capacity)
		}
	}
	model{spends: capacity + 10*capacity, modest: 36 * 3 * one}.check(t, s)
	forgiven := 2 * float64(3600*20-11*1000) // by the route's bucket and the day
	if got := i.metric(t, "forgiven_tokens_total"); math.Abs(got-forgiven) > 1 {
		t.Errorf("%v tokens forgiven, want %v", got, forgiven)
	}
}

// A batch that is published again after the stream has forgotten its id is stored a second
// time, and settled once.
func TestRepublishedAfterDedupWindow(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	bustest.Await(t, "connection", b.Connected)
	streams := events.Streams()
	for k := range streams {
		streams[k].Dedup = 100 * time.Millisecond
	}
	if err := b.Provision(t.Context(), streams); err != nil {
		t.Fatal(err)
	}
	s := memstore.New(nil)
	one, two := start(t, b, s, fast()), start(t, b, s, fast())
	settled(t, one)
	settled(t, two)
	want := model{}
	p := newPublisher(t, b, "boot", want)
	data := p.batch(1, 2, 3)
	first := p.publish(data, p.id())
	if again := p.publish(data, p.id()); again != first {
		t.Fatalf("stored at %d and %d within the dedup window", first, again)
	}
	var again uint64
	bustest.Await(t, "end of the dedup window", func() bool {
		again = p.publish(data, p.id())
		return again != first
	})
	p.send(1, 2)
	one.flush(t)
	two.flush(t)
	want.check(t, s)
	if got := one.metric(t, "settlements_total", "duplicate") + two.metric(t, "settlements_total", "duplicate"); got == 0 {
		t.Error("the store was never told of the second copy")
	}
}

func TestPoisonIsSetAside(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	s := memstore.New(nil)
	settlers := []*instance{start(t, b, s, fast()), start(t, b, s, fast())}
	for _, i := range settlers {
		settled(t, i)
	}
	want := model{}
	p := newPublisher(t, b, "boot", want)
	p.send(1, 2)
	huge := bytes.Repeat([]byte("x"), 900<<10)
	poison := [][]byte{
		[]byte("not json"),
		nil,
		huge,
		[]byte(`{"type":"aegis.response.v2","boot":"b","n":1}`),
		[]byte(`{"type":"aegis.response.v1","boot":"b","n":0}`),
		[]byte(`{"type":"aegis.response.v1","boot":"b","n":1,"events":[{"id":"x","client":"c","time":1,"outcome":"ok","base":1e99}]}`),
		// Well formed, but a charge no store can take; its good event must not be half settled.
		p.encode(event("good", client(9), "5"), func() events.Response {
			e := event("bad", client(10), "5")
			e.Charges[1].Scope = "not-a-day"
			return e
		}()),
	}
	var seqs []uint64
	for k, data := range poison {
		seqs = append(seqs, p.publish(data, fmt.Sprint("poison", k)))
		p.send(1, 3)
	}
	for _, i := range settlers {
		i.flush(t)
	}
	want[client(9)], want[client(10)] = 0, 0
	want.check(t, s)

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	state, err := b.Stream(ctx, events.StreamDeadLetter)
	if err != nil {
		t.Fatal(err)
	}
	if state.Msgs != uint64(len(poison)) {
		t.Errorf("%d dead letters, want %d: one for each message, however many settlers", state.Msgs, len(poison))
	}
	k := 0
	err = b.Follow(ctx, events.StreamDeadLetter, bus.All(), func(m bus.Message) error {
		d, err := events.Decode[events.DeadLetter](m.Data)
		if err != nil {
			return err
		}
		data := poison[k]
		if len(data) > len(d.Data) && len(d.Data) == 512<<10 && strings.Contains(d.Reason, "cut from") {
			data = data[:len(d.Data)]
		}
		if d.Stream != events.StreamResponses || d.Seq != seqs[k] || !bytes.Equal(d.Data, data) {
			t.Errorf("dead letter %d: seq %d, reason %q, data %.60s", k, d.Seq, d.Reason, base64.StdEncoding.EncodeToString(d.Data))
		}
		if k++; m.Pending == 0 {
			cancel()
		}
		return nil
	})
	if ctx.Err() == nil {
		t.Fatal(err)
	}
}

// While NATS is away a dead letter can't be stored, and no cursor passes its message.
func TestPoisonWaitsForNATS(t *testing.T) {
	t.Parallel()
	n := bustest.Start(t)
	b := n.Provisioned(t)
	s := memstore.New(nil)
	gate := &gated{Store: s, poison: make(chan struct{})}
	i := start(t, b, gate, fast())
	settled(t, i)
	want := model{}
	p := newPublisher(t, b, "boot", want)
	p.send(1)
	i.flush(t)
	gate.armed.Store(true)
	data := p.batch(2) // the store finds the bucket unreadable, once NATS is gone
	want[client(2)] = 0
	seq := p.publish(data, p.id())
	bustest.Await(t, "settlement of the bucket", func() bool { return gate.waiting.Load() })
	n.Stop()
	close(gate.poison)
	bustest.Await(t, "attempt at a dead letter", func() bool { return i.log.count("cannot store a dead letter") > 1 })
	if meta, err := s.Meta(t.Context(), store.ShardOf(client(2))); err != nil || meta.Cursor >= seq {
		t.Errorf("cursor %d, %v: passed message %d before its dead letter was stored", meta.Cursor, err, seq)
	}
	n.Restart()
	p.send(1)
	i.flush(t)
	want.check(t, s)
	if m, err := b.Last(t.Context(), events.StreamDeadLetter, events.SubjectDeadLetter("settler")); err != nil {
		t.Error(err)
	} else if d, err := events.Decode[events.DeadLetter](m.Data); err != nil || d.Seq != seq || !strings.Contains(d.Reason, client(2)) {
		t.Errorf("dead letter %+v, %v", d, err)
	}
}

// gated is a store in which one client's bucket turns out to be unreadable, when told so.
type gated struct {
	store.Store
	armed, waiting atomic.Bool
	poison         chan struct{}
}

func (g *gated) Settle(ctx context.Context, st store.Settlement) (store.Settled, error) {
	for k, it := range st.Items {
		if g.armed.Load() && it.Client == client(2) {
			g.waiting.Store(true)
			<-g.poison
			return store.Settled{}, fmt.Errorf("settle: %w", &store.StateError{Index: k, Reason: "tokens: garbage"})
		}
	}
	return g.Store.Settle(ctx, st)
}

// A bucket that can't be read costs its own item only: the others of the message are settled.
func TestUnreadableBucket(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	r := redistest.Start(t)
	s := redisStore(t, r)
	i := start(t, b, s, fast())
	settled(t, i)
	want := model{}
	p := newPublisher(t, b, "boot", want)
	p.send(1, 2)
	i.flush(t)
	keys, err := r.Client.Keys(t.Context(), "ratelimit:tb:*").Result()
	if err != nil || len(keys) != 2 {
		t.Fatalf("keys %q, %v", keys, err)
	}
	intact := map[string]string{}
	for _, k := range keys {
		intact[k] = r.Client.HGet(t.Context(), k, "tokens").Val()
		if err := r.Client.HSet(t.Context(), k, "tokens", "garbage").Err(); err != nil {
			t.Fatal(err)
		}
	}
	p.want = model{} // of the message to come only the days count
	p.send(1, 2)
	i.flush(t)
	for _, k := range keys {
		if err := r.Client.HSet(t.Context(), k, "tokens", intact[k]).Err(); err != nil {
			t.Fatal(err)
		}
	}
	var letters []events.DeadLetter
	for _, seq := range []uint64{1, 2} {
		m, err := b.At(t.Context(), events.StreamDeadLetter, seq)
		if err != nil {
			t.Fatal(err)
		}
		d, err := events.Decode[events.DeadLetter](m.Data)
		if err != nil || d.Bucket == nil || d.Bucket.Scope != route || d.Seq != 2 {
			t.Fatalf("dead letter %+v, %v", d, err)
		}
		letters = append(letters, d)
	}
	retry := func() { // as an operator does, for longer apart than the stream knows ids
		for _, d := range letters {
			batch, err := d.Retry()
			if err != nil {
				t.Fatal(err)
			}
			data, err := events.Encode(batch)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := b.Publish(t.Context(), events.SubjectRetry, data); err != nil {
				t.Fatal(err)
			}
		}
		i.flush(t)
	}
	for _, c := range []int{1, 2} {
		d, err := s.Check(t.Context(), store.Check{Client: client(c), Limits: []store.Limit{
			{Scope: route, Spec: specs[0]}, {Scope: bucket.ScopeDay, Spec: specs[1]}}})
		if err != nil {
			t.Fatal(err)
		}
		if day, all := capacity-d.Limits[1].Remaining, want[client(c)]+p.want[client(c)]; day != all {
			t.Errorf("%s: day %d, want %d", client(c), day, all)
		}
		if token := capacity - d.Limits[0].Remaining; (token+step-1)/step*step != want[client(c)] {
			t.Errorf("%s: bucket %d, want %d", client(c), token, want[client(c)])
		}
	}
	if got := i.metric(t, "dead_letters_total"); got != 2 {
		t.Errorf("%v items set aside, want 2", got)
	}
	retry()
	retry() // to no effect
	for name, taken := range p.want {
		want[name] += taken
	}
	want.check(t, s)
	// The gauge is told once a second, and begins with the shards that had yet to catch up.
	bustest.Await(t, "no shard being parked for a bucket that can't be read", func() bool { return i.metric(t, "parked_shards") == 0 })
}

// failing is a store in which the given shard does not answer.
type failing struct {
	store.Store
	down atomic.Int64 // the shard; -1: none
	err  error
}

func (f *failing) Settle(ctx context.Context, st store.Settlement) (store.Settled, error) {
	if int64(st.Shard) == f.down.Load() {
		return store.Settled{}, f.err
	}
	return f.Store.Settle(ctx, st)
}

func (f *failing) Meta(ctx context.Context, shard int) (store.Meta, error) {
	if int64(shard) == f.down.Load() {
		return store.Meta{}, f.err
	}
	return f.Store.Meta(ctx, shard)
}

// A shard that does not answer is parked, holds no other back, and catches up.
func TestDeadShardHoldsNobodyBack(t *testing.T) {
	t.Parallel()
	for _, kind := range []error{store.ErrUnavailable, store.ErrUnknown, store.ErrState} {
		t.Run(kind.Error(), func(t *testing.T) {
			t.Parallel()
			b := bustest.Start(t).Provisioned(t)
			s := memstore.New(nil)
			f := &failing{Store: s, err: kind}
			f.down.Store(-1)
			i := start(t, b, f, fast())
			settled(t, i)
			want := model{}
			p := newPublisher(t, b, "boot", want)
			dead, alive := 1, 2
			p.send(dead, alive)
			i.flush(t)
			f.down.Store(int64(store.ShardOf(client(dead))))
			var last uint64
			for range 500 {
				data := p.batch(dead, alive)
				last = p.publish(data, p.id())
			}
			bustest.Await(t, "settlement of the other shards", func() bool {
				m, err := s.Meta(t.Context(), store.ShardOf(client(alive)))
				return err == nil && m.Cursor >= last
			})
			if m, err := s.Meta(t.Context(), store.ShardOf(client(dead))); err != nil || m.Cursor >= last {
				t.Fatalf("the dead shard's cursor: %d, %v", m.Cursor, err)
			}
			if _, err := i.Ready(t.Context()); err != nil {
				t.Errorf("one dead shard makes the settler not ready: %v", err)
			}
			f.down.Store(-1)
			i.flush(t)
			want.check(t, s)
			if got := i.metric(t, "store_failures_total"); got == 0 {
				t.Error("no failure was counted")
			}
		})
	}
}

// Traffic that never pauses can't keep a parked shard from coming back.
func TestCatchesUpUnderTraffic(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	s := memstore.New(nil)
	f := &failing{Store: s, err: store.ErrUnavailable}
	f.down.Store(-1)
	i := start(t, b, f, fast())
	settled(t, i)
	want := model{}
	p := newPublisher(t, b, "boot", want)
	f.down.Store(int64(store.ShardOf(client(1))))
	for n := 0; ; n++ {
		p.send(1, 2, 3)
		if n == 1000 {
			f.down.Store(-1)
		}
		if d, _ := i.Ready(t.Context()); n > 1000 && d.(settler.Detail).Parked == 0 {
			break
		}
		if n == 20_000 {
			t.Fatal("the shard is still not up to date")
		}
	}
	i.flush(t)
	want.check(t, s)
}

// A backlog that takes longer than the catch-up reader reads at a time is worked off, though
// most shards have nothing in it.
func TestLongBacklog(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	s := memstore.New(nil)
	i := start(t, b, s, fast())
	settled(t, i)
	i.stop()
	want := model{}
	p := newPublisher(t, b, "boot", want)
	for range 2000 {
		p.send(1)
	}
	i = startWith(t, b, s, fast(), func(s *settler.Service) { s.SetSession(5 * time.Millisecond) })
	settled(t, i)
	want.check(t, s)
}

// All that is in a stream that was made anew is settled, whether that happens under a running
// settler or before the next one starts.
func TestStreamMadeAnew(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running=%v", running), func(t *testing.T) {
			t.Parallel()
			n := bustest.Start(t)
			b := n.Provisioned(t)
			s := memstore.New(nil)
			i := start(t, b, s, fast())
			settled(t, i)
			want := model{}
			p := newPublisher(t, b, "boot", want)
			for range 50 {
				p.send(1, 2, 3)
			}
			i.flush(t)
			if !running {
				i.stop()
			}
			n.DeleteStream(t, events.StreamResponses)
			if err := b.Provision(t.Context(), events.Streams()); err != nil {
				t.Fatal(err)
			}
			p.again() // the last batch was in the old stream and is in the new one
			for range 10 {
				p.send(1, 2, 4)
			}
			if !running {
				i = start(t, b, s, fast())
			}
			i.flush(t)
			want.check(t, s)
			if i.log.count("another stream") == 0 {
				t.Error("nothing was logged")
			}
			if got := i.metric(t, "settlements_total", "duplicate"); got == 0 {
				t.Error("the batch that is in both streams was not recognised")
			}
		})
	}
}

// Cursors of shards that nothing happens to advance all the same, so that the stream can be purged.
// An operator purges what a settler that is away has yet to settle: it is counted, and the rest goes on.
func TestPurgeIsNoticed(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	s := memstore.New(nil)
	first := start(t, b, s, fast())
	settled(t, first)
	first.stop()
	p := newPublisher(t, b, "boot", model{})
	p.send(1, 2, 3) // gone
	want := model{client(1): 0, client(2): 0, client(3): 0}
	p.want = want
	seq := p.publish(p.batch(1, 2), p.id())
	if err := b.Purge(t.Context(), events.StreamResponses, seq); err != nil {
		t.Fatal(err)
	}
	i := start(t, b, s, fast())
	i.flush(t)
	want.check(t, s)
	if got := i.metric(t, "expired_messages_total"); got != store.Shards {
		t.Errorf("%v messages are said to have gone unsettled, want one in each of %d shards", got, store.Shards)
	}
	if i.log.count("left the stream before they were settled") == 0 {
		t.Error("nothing was logged")
	}
}

// The response stream is restored from a backup that ends before what was settled. The settler notices, whether
// it runs or starts later: what comes next is settled under sequences that it has seen before, and nothing twice.
func TestStreamRestoredFromABackup(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running=%v", running), func(t *testing.T) {
			t.Parallel()
			n := bustest.Start(t)
			b := n.Provisioned(t)
			s := memstore.New(nil)
			i := start(t, b, s, fast())
			settled(t, i)
			want := model{}
			p := newPublisher(t, b, "boot", want)
			send := func(count int) {
				for range count {
					p.send(1, 2, 3)
				}
			}
			send(20)
			i.flush(t)
			n.Stop()
			restore := n.Backup()
			n.Restart()
			send(30)
			i.flush(t)
			if !running {
				i.stop()
			}
			n.Stop()
			restore()
			n.Restart()
			if !running {
				i = start(t, b, s, fast())
			}
			bustest.Await(t, "the settler to notice", func() bool { return i.log.count("restored from a backup") > 0 })
			send(40)
			i.flush(t)
			want.check(t, s)
			if got := i.metric(t, "settlements_total", "duplicate"); got == 0 {
				t.Error("what the backup holds was not read again")
			}
		})
	}
}

func TestIdleCursorsAndPurge(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	s := memstore.New(nil)
	cfg := fast()
	cfg.PurgeMargin, cfg.PurgeAge = 10, 0
	i := start(t, b, s, cfg)
	settled(t, i)
	want := model{}
	p := newPublisher(t, b, "boot", want)
	for range 100 {
		p.send(1)
	}
	bustest.Await(t, "purge up to the margin", func() bool {
		state, err := b.Stream(t.Context(), events.StreamResponses)
		return err == nil && state.First == 91 && state.Last == 100
	})
	for shard := range store.Shards {
		if m, err := s.Meta(t.Context(), shard); err != nil || m.Cursor != 100 {
			t.Errorf("shard %d: cursor %d, %v, want 100", shard, m.Cursor, err)
		}
	}
	p.again() // the purge has not forgotten the batch
	p.send(1)
	i.flush(t)
	want.check(t, s)
}

// A first start has no cursors: it begins at the end of the stream, and says so.
func TestBeginsAtTheEnd(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	s := memstore.New(nil)
	newPublisher(t, b, "before", model{}).send(1, 2)
	i := start(t, b, s, fast())
	settled(t, i)
	want := model{}
	newPublisher(t, b, "after", want).send(1, 3)
	want[client(2)] = 0
	i.flush(t)
	want.check(t, s)
	if got := i.log.count("settlement starts at the end of the stream"); got != 1 {
		t.Errorf("logged %d times, want once for all shards", got)
	}
}

// A stop leaves a shard neither half settled nor unknown; the next settler goes on where it ended.
func TestStopAndGoOn(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	s := memstore.New(nil)
	i := start(t, b, s, fast())
	settled(t, i)
	want := model{}
	p := newPublisher(t, b, "boot", want)
	for range 5 {
		for range 40 {
			p.send(1, 2, 3, 4, 5, 6, 7)
		}
		i.stop()
		i = start(t, b, s, fast())
	}
	settled(t, i)
	want.check(t, s)
}

// Nothing is lost while NATS is away, and settling resumes by itself.
func TestNATSRestart(t *testing.T) {
	t.Parallel()
	n := bustest.Start(t)
	b := n.Provisioned(t)
	s := memstore.New(nil)
	i := start(t, b, s, fast())
	settled(t, i)
	want := model{}
	p := newPublisher(t, b, "boot", want)
	for range 3 {
		for range 20 {
			p.send(1, 2, 3)
		}
		n.Restart()
	}
	p.send(1)
	bustest.Await(t, "connection", b.Connected)
	i.flush(t)
	want.check(t, s)
}

func TestConfigValidate(t *testing.T) {
	t.Parallel()
	for _, change := range []func(*settler.Config){
		func(c *settler.Config) { c.Parallel = 0 },
		func(c *settler.Config) { c.IdleEvery = 0 },
		func(c *settler.Config) { c.PurgeAge = -1 },
		func(c *settler.Config) { c.StoreTimeout = 0 },
	} {
		cfg := settler.DefaultConfig()
		change(&cfg)
		if _, err := settler.New(cfg, settler.Deps{}); err == nil {
			t.Errorf("accepted: %+v", cfg)
		}
	}
}

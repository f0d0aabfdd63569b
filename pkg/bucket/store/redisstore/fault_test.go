package redisstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
)

// still is a bucket that does not refill while a test runs.
func still(capacity int64) bucket.Spec {
	return bucket.Spec{Kind: bucket.TokenBucket, Capacity: capacity * bucket.One, Rate: 1, SlowestRate: 1, MaxDebt: 10 * capacity * bucket.One}
}

func one(client string, spec bucket.Spec) store.Check {
	return store.Check{Client: client, Cost: bucket.One, Limits: []store.Limit{{Scope: "r", Spec: spec}}}
}

// load checks clients from several callers until stop is called, which returns how many checks were
// green, and what failed.
func load(t *testing.T, s store.Store, callers int, client func(i int) string, spec bucket.Spec) (stop func() (green int64, failed []error)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	var (
		wg       sync.WaitGroup
		mu       sync.Mutex
		n, count atomic.Int64
		failed   []error
	)
	for range callers {
		wg.Go(func() {
			for ctx.Err() == nil {
				d, err := s.Check(context.Background(), one(client(int(n.Add(1))), spec))
				switch {
				case err != nil:
					mu.Lock()
					failed = append(failed, err)
					mu.Unlock()
				case d.Tier == bucket.Green:
					count.Add(1)
				}
			}
		})
	}
	return func() (int64, []error) {
		cancel()
		wg.Wait()
		return count.Load(), failed
	}
}

// eventually waits until check holds.
func eventually(t *testing.T, what string, check func() bool) {
	t.Helper()
	redistest.Await(t, what, func() error {
		if check() {
			return nil
		}
		return errors.New("not yet")
	})
}

// Case 10: scripts are flushed under load, from 16 callers.
func TestScriptFlush(t *testing.T) {
	t.Parallel()
	r := redistest.Start(t)
	s := open(t, Options{Addrs: []string{r.Addr}})
	stop := load(t, s, 16, func(i int) string { return strconv.Itoa(i % 50) }, still(1000))
	for range 30 {
		if err := r.Client.ScriptFlush(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Millisecond) // lets calls in between
	}
	green, failed := stop()
	if len(failed) > 0 {
		t.Errorf("%d calls failed, the first: %v", len(failed), failed[0])
	}
	var spent int64
	for i := range 50 {
		d, err := s.Check(t.Context(), store.Check{Client: strconv.Itoa(i), Limits: []store.Limit{{Scope: "r", Spec: still(1000)}}})
		if err != nil {
			t.Fatal(err)
		}
		spent += int64(math.Round(float64(1000*bucket.One-d.Limits[0].Remaining) / bucket.One))
	}
	if spent != green || green == 0 {
		t.Errorf("%d checks were green, %d tokens are spent", green, spent)
	}
}

// Case 13: a Redis that stalls holds a call no longer than its timeout, however many wait, and
// nothing is sent twice. What was sent is unknown, what was not is known not to have run.
func TestStall(t *testing.T) {
	t.Parallel()
	const timeout = 300 * time.Millisecond
	r := redistest.Start(t)
	s, err := New(Options{Addrs: []string{r.Addr}, PoolSize: 4, Timeout: timeout, PoolTimeout: timeout, DialTimeout: timeout})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Check(t.Context(), one("c", still(1000))); err != nil {
		t.Fatal(err)
	}
	r.Stop(t)
	var wg sync.WaitGroup
	var unknown, unavailable atomic.Int64
	for range 100 {
		wg.Go(func() {
			start := time.Now()
			_, err := s.Check(context.Background(), one("c", still(1000)))
			if took := time.Since(start); took > 3*timeout {
				t.Errorf("held for %v", took)
			}
			switch {
			case errors.Is(err, store.ErrUnknown):
				unknown.Add(1)
			case errors.Is(err, store.ErrUnavailable):
				unavailable.Add(1)
			default:
				t.Errorf("answered %v", err)
			}
		})
	}
	wg.Wait()
	if err := s.Ping(t.Context()); err == nil {
		t.Error("a stalled Redis answered a ping")
	}
	r.Cont(t)
	var after store.Decision
	redistest.Await(t, "a check after the stall", func() (err error) {
		after, err = s.Check(t.Context(), store.Check{Client: "c", Limits: []store.Limit{{Scope: "r", Spec: still(1000)}}})
		return err
	})
	// At most what is unknown has run; the one before did.
	if ran := after.Limits[0].Seq - 1; ran > unknown.Load() || unknown.Load() == 0 || unavailable.Load() == 0 {
		t.Errorf("%d ran, %d are unknown, %d did not run", ran, unknown.Load(), unavailable.Load())
	}
	redistest.Await(t, "a ping after the stall", func() error { return s.Ping(t.Context()) })
}

// A caller's deadline ends its wait for a turn, and says that nothing was sent.
func TestWaitForTurnEndsWithContext(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	sent := make(chan int, 10)
	b := &batcher{patience: time.Minute, send: func(calls []*ask) { sent <- len(calls); <-release }}
	var wg sync.WaitGroup
	for range inFlight {
		wg.Go(func() { b.do(context.Background(), &ask{}) })
		<-sent
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.do(ctx, &ask{}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("left with %v", err)
	}
	// Those that wait go together when a pipeline is free, in one batch.
	for range 3 {
		wg.Go(func() { b.do(context.Background(), &ask{}) })
	}
	eventually(t, "three calls to wait", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.waiting) == 3
	})
	release <- struct{}{}
	if n := <-sent; n != 3 {
		t.Errorf("a batch of %d, want 3", n)
	}
	close(release)
	wg.Wait()
	if b.running != 0 || len(b.waiting) != 0 {
		t.Errorf("%d running, %d waiting at the end", b.running, len(b.waiting))
	}
}

// However many wait, a batch has no more limits than Redis decides well within the timeout; none is left behind.
func TestBatchIsBounded(t *testing.T) {
	t.Parallel()
	const callers = 50
	release := make(chan struct{})
	sent := make(chan int, callers)
	b := &batcher{patience: time.Minute, send: func(calls []*ask) { sent <- len(calls); <-release }}
	three := store.Check{Limits: make([]store.Limit, 3)}
	var wg sync.WaitGroup
	for range inFlight {
		wg.Go(func() { b.do(context.Background(), &ask{check: three}) })
		<-sent
	}
	for range callers {
		wg.Go(func() { b.do(context.Background(), &ask{check: three}) })
	}
	eventually(t, "all others to wait", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.waiting) == callers
	})
	close(release)
	wg.Wait()
	close(sent)
	var sizes []int
	left := callers
	for n := range sent {
		sizes = append(sizes, n)
		left -= n
	}
	if slices.Max(sizes) != maxBatch/3 || left != 0 {
		t.Errorf("batches of %v, %d not sent", sizes, left)
	}
}

// Behind a server that stalls, who has waited its time is not sent any more.
func TestLateCallsAreNotSent(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	var sent atomic.Int64
	b := &batcher{patience: time.Nanosecond, send: func(calls []*ask) { sent.Add(int64(len(calls))); <-release }}
	var wg sync.WaitGroup
	for range inFlight {
		wg.Go(func() { b.do(context.Background(), &ask{}) })
	}
	eventually(t, "the pipelines to be busy", func() bool { return sent.Load() == inFlight })
	for range 5 {
		wg.Go(func() {
			if err := b.do(context.Background(), &ask{}); !errors.Is(err, store.ErrUnavailable) {
				t.Errorf("late: %v", err)
			}
		})
	}
	eventually(t, "five calls to wait", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.waiting) == 5
	})
	close(release)
	wg.Wait()
	if sent.Load() != inFlight {
		t.Errorf("%d calls sent, want %d", sent.Load(), inFlight)
	}
}

// A check that can't be decided leaves those in the same batch alone, and changes nothing itself.
func TestBatchedApart(t *testing.T) {
	t.Parallel()
	r := redistest.Start(t)
	s := open(t, Options{Addrs: []string{r.Addr}})
	key := func(client string) string { return bucketKey(bucket.TokenBucket, "r", client) }
	r.Client.Set(t.Context(), key("text"), "no hash", 0)
	r.Client.HSet(t.Context(), key("torn"), "tokens", "many", "gen", 1)
	r.Client.HSet(t.Context(), bucketKey(bucket.SlidingWindow, "r", "late"), "9007199254740991", "1:0", "window", 60)
	window := store.Limit{Scope: "r", Spec: bucket.Spec{Kind: bucket.SlidingWindow, Capacity: 5 * bucket.One, Window: 60}}
	torn := store.Check{Client: "torn", Cost: bucket.One, Limits: []store.Limit{
		{Scope: bucket.ScopeDay, Spec: bucket.Spec{Kind: bucket.DailyQuota, Capacity: 5 * bucket.One}},
		{Scope: "r", Spec: still(5)},
	}}
	asks := []*ask{
		{check: one("a", still(5))}, {check: one("text", still(5))}, {check: torn}, {check: one("a", still(5))},
		{check: one("late", still(5))}, // to be switched from a window that no clock reaches
		{check: store.Check{Client: "w", Cost: bucket.One, Limits: []store.Limit{window}}},
	}
	s.decide(asks)
	for i, remaining := range map[int]int64{0: 4, 3: 3, 5: 4} {
		if asks[i].err != nil || asks[i].decision.Limits[0].Remaining != remaining*bucket.One {
			t.Errorf("check %d: %+v, %v", i, asks[i].decision, asks[i].err)
		}
	}
	for i, index := range map[int]int{1: -1, 2: 1, 4: 0} {
		var state *store.StateError
		if err := asks[i].err; !errors.Is(err, store.ErrState) || errors.As(err, &state) && state.Index != index {
			t.Errorf("check %d: %v", i, err)
		}
	}
	if n := r.Client.Exists(t.Context(), bucketKey(bucket.DailyQuota, bucket.ScopeDay, "torn")).Val(); n != 0 {
		t.Error("a request that could not be decided was charged")
	}
}

// A master is demoted behind an address that leads to the new one by now: connections to the old one are dropped.
func TestDemotedBehindOneAddress(t *testing.T) {
	t.Parallel()
	before, after := redistest.Start(t), redistest.Start(t)
	master := atomic.Value{}
	master.Store(before.Addr)
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer front.Close()
	go func() {
		for {
			client, err := front.Accept()
			if err != nil {
				return // the test is over
			}
			server, err := net.Dial("tcp", master.Load().(string))
			if err != nil {
				client.Close()
				continue
			}
			for _, c := range [][2]net.Conn{{client, server}, {server, client}} {
				go func() {
					io.Copy(c[0], c[1]) // until either is closed
					c[0].Close()
				}()
			}
		}
	}()
	s := open(t, Options{Addrs: []string{front.Addr().String()}})
	if _, err := s.Check(t.Context(), one("c", still(100))); err != nil {
		t.Fatal(err)
	}
	master.Store(after.Addr)
	before.Client.Do(t.Context(), "replicaof", "127.0.0.1", "1")
	refused := 0
	redistest.Await(t, "a check on the new master", func() error {
		_, err := s.Check(t.Context(), one("c", still(100)))
		if err != nil && !errors.Is(err, store.ErrUnavailable) {
			t.Fatal(err)
		}
		if err != nil {
			refused++
		}
		return err
	})
	if refused == 0 {
		t.Error("a connection to the old master was not asked")
	}
}

// No server: known not to have run. A killed and restarted one: served again without help.
func TestRestart(t *testing.T) {
	t.Parallel()
	r := redistest.Start(t)
	s := open(t, Options{Addrs: []string{r.Addr}})
	if _, err := s.Check(t.Context(), one("c", still(5))); err != nil {
		t.Fatal(err)
	}
	r.Kill(t)
	redistest.Await(t, "calls to be refused", func() error {
		_, err := s.Check(t.Context(), one("c", still(5)))
		if errors.Is(err, store.ErrUnavailable) {
			return nil
		}
		return fmt.Errorf("answered %w", err)
	})
	if err := s.Ping(t.Context()); err == nil {
		t.Error("a dead Redis answered a ping")
	}
	r.Restart(t)
	redistest.Await(t, "a check", func() error {
		_, err := s.Check(t.Context(), one("c", still(5)))
		return err
	})
}

// A full Redis refuses a new bucket, and nothing was changed; those that are there go on, by every algorithm.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	r := redistest.Start(t, "--maxmemory-policy", "noeviction")
	s := open(t, Options{Addrs: []string{r.Addr}})
	window := bucket.Spec{Kind: bucket.SlidingWindow, Capacity: 5 * bucket.One, Window: 3600}
	day := bucket.Spec{Kind: bucket.DailyQuota, Capacity: 5 * bucket.One}
	for i, spec := range []bucket.Spec{still(5), window, day} {
		check := func(client string) store.Check {
			c := one(client, spec)
			if spec.Kind == bucket.DailyQuota {
				c.Limits[0].Scope = bucket.ScopeDay
			}
			return c
		}
		if _, err := s.Check(t.Context(), check("known")); err != nil {
			t.Fatal(err)
		}
		r.Client.ConfigSet(t.Context(), "maxmemory", "1")
		d, err := s.Check(t.Context(), check("known"))
		if err != nil || d.Limits[0].Seq != 2 || d.Limits[0].Remaining/bucket.One != 3 {
			t.Errorf("%s that is there: %+v, %v", spec.Kind, d, err)
		}
		asks := []*ask{{check: check("new")}, {check: check("known")}} // in one call
		s.decide(asks)
		if !errors.Is(asks[0].err, store.ErrFull) {
			t.Errorf("new %s: %v", spec.Kind, asks[0].err)
		}
		if d := asks[1].decision; asks[1].err != nil || d.Limits[0].Seq != 3 {
			t.Errorf("%s that is there, beside a new one: %+v, %v", spec.Kind, d, asks[1].err)
		}
		if n := r.Client.Exists(t.Context(), bucketKey(spec.Kind, check("").Limits[0].Scope, "new")).Val(); n != 0 {
			t.Errorf("new %s was written", spec.Kind)
		}
		key := bucketKey(spec.Kind, check("").Limits[0].Scope, "known")
		if ttl := r.Client.TTL(t.Context(), key).Val(); ttl < time.Minute {
			t.Errorf("%s has a time to live of %s", spec.Kind, ttl)
		}
		r.Client.ConfigSet(t.Context(), "maxmemory", "0")
		if i == 0 {
			r.Client.Del(t.Context(), key) // the window would be switched to from it
		}
	}
	// Settlement goes on, of a bucket that is gone too.
	m, err := s.Begin(t.Context(), store.ShardOf("new"), "s", 0)
	if err != nil {
		t.Fatal(err)
	}
	r.Client.ConfigSet(t.Context(), "maxmemory", "1")
	st := store.Settlement{Shard: store.ShardOf("new"), Stream: "s", Prev: m.Cursor, Seq: 1, Boot: "b", N: 1,
		Items: []store.Item{{Client: "new", Scope: "r", Spec: still(5), Delta: bucket.One, Time: time.Now().UnixMicro()}}}
	if got, err := s.Settle(t.Context(), st); err != nil || got.Status != store.Applied || got.Items[0].Remaining != 4*bucket.One {
		t.Errorf("settled %+v, %v", got, err)
	}
}

// A daily quota is still used up after Redis has died and started again, with the append-only file that deploy/redis.conf asks for.
func TestDailyQuotaSurvivesRestart(t *testing.T) {
	t.Parallel()
	r := redistest.Start(t, "--appendonly", "yes")
	s := open(t, Options{Addrs: []string{r.Addr}})
	c := store.Check{Client: "c", Cost: 5 * bucket.One, Limits: []store.Limit{
		{Scope: bucket.ScopeDay, Spec: bucket.Spec{Kind: bucket.DailyQuota, Capacity: 5 * bucket.One}}}}
	before, err := s.Check(t.Context(), c)
	if err != nil || before.Tier != bucket.Green {
		t.Fatalf("%+v, %v", before, err)
	}
	r.Kill(t)
	r.Restart(t)
	c.Cost = bucket.One
	var after store.Decision
	redistest.Await(t, "a check", func() (err error) {
		after, err = s.Check(t.Context(), c)
		return err
	})
	if after.Tier != bucket.Red && after.Limits[0].Window == before.Limits[0].Window {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

// Case 9, and garbage: what other programs may have stored is read, or refused, never admitted for free.
func TestStoredByOthers(t *testing.T) {
	t.Parallel()
	r := redistest.Start(t)
	s := open(t, Options{Addrs: []string{r.Addr}})
	key := bucketKey(bucket.TokenBucket, "r", "c")
	now := time.Now().UnixMicro()
	for name, tc := range map[string]struct {
		hash map[string]any
		tier bucket.Tier
		fail bool
	}{
		"exponent":      {hash: map[string]any{"tokens": "1e+15", "last_updated": now}, tier: bucket.Green},
		"just short":    {hash: map[string]any{"tokens": "0.9", "last_updated": now}, tier: bucket.Red},
		"deep debt":     {hash: map[string]any{"tokens": "-1e+30", "last_updated": now}, tier: bucket.Red},
		"garbage":       {hash: map[string]any{"tokens": "garbage", "last_updated": now}, fail: true},
		"nan":           {hash: map[string]any{"tokens": "nan", "last_updated": now}, fail: true},
		"infinite":      {hash: map[string]any{"tokens": "inf", "last_updated": now}, fail: true},
		"empty":         {hash: map[string]any{"tokens": "", "last_updated": now}, fail: true},
		"no tokens":     {hash: map[string]any{"last_updated": now}, fail: true},
		"no time":       {hash: map[string]any{"tokens": "1.000000"}, fail: true},
		"broken time":   {hash: map[string]any{"tokens": "1.000000", "last_updated": "1.5"}, fail: true},
		"huge time":     {hash: map[string]any{"tokens": "1.000000", "last_updated": "9e18"}, fail: true},
		"late time":     {hash: map[string]any{"tokens": "1.000000", "last_updated": 1<<53 - 1}, fail: true},
		"broken seq":    {hash: map[string]any{"tokens": "1.000000", "last_updated": now, "seq": "x"}, fail: true},
		"zero capacity": {hash: map[string]any{"tokens": "1.000000", "last_updated": now, "cap": "0"}, fail: true},
	} {
		r.Client.Del(t.Context(), key)
		r.Client.HSet(t.Context(), key, tc.hash)
		d, err := s.Check(t.Context(), one("c", still(3)))
		var state *store.StateError
		switch {
		case tc.fail && (!errors.As(err, &state) || !errors.Is(err, store.ErrState) || state.Index != 0):
			t.Errorf("%s: %+v, %v", name, d, err)
		case !tc.fail && (err != nil || d.Tier != tc.tier || d.Limits[0].Remaining > 3*bucket.One):
			t.Errorf("%s: %+v, %v", name, d, err)
		}
	}

	// The settlement that meets one names its item, and changes nothing.
	shard := store.ShardOf("c")
	if _, err := s.Begin(t.Context(), shard, "s", 0); err != nil {
		t.Fatal(err)
	}
	r.Client.Del(t.Context(), key)
	r.Client.HSet(t.Context(), key, "tokens", "garbage", "last_updated", now)
	st := store.Settlement{Shard: shard, Stream: "s", Seq: 1, Boot: "b", N: 1, Items: []store.Item{
		{Client: "c", Scope: "ok", Spec: still(3), Delta: bucket.One, Time: now},
		{Client: "c", Scope: "r", Spec: still(3), Delta: bucket.One, Time: now},
	}}
	var state *store.StateError
	if _, err := s.Settle(t.Context(), st); !errors.As(err, &state) || state.Index != 1 {
		t.Errorf("settle: %v", err)
	}
	if n := r.Client.Exists(t.Context(), bucketKey(bucket.TokenBucket, "ok", "c")).Val(); n != 0 {
		t.Error("the other item was applied")
	}
	r.Client.Del(t.Context(), key)
	r.Client.Set(t.Context(), key, "a string", 0)
	if _, err := s.Check(t.Context(), one("c", still(3))); !errors.Is(err, store.ErrState) {
		t.Errorf("a string in a bucket's place: %v", err)
	}
	r.Client.HSet(t.Context(), metaKey(shard), "format", "99")
	if _, err := s.Begin(t.Context(), shard, "s", 0); !errors.Is(err, store.ErrState) {
		t.Errorf("another format: %v", err)
	}
}

// A bucket that a later sequence was settled into, as after a restore, takes no earlier one.
func TestSettledBucketTakesNoEarlierSequence(t *testing.T) {
	t.Parallel()
	r := redistest.Start(t)
	s := open(t, Options{Addrs: []string{r.Addr}})
	shard := store.ShardOf("c")
	if _, err := s.Begin(t.Context(), shard, "s", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Check(t.Context(), one("c", still(10))); err != nil {
		t.Fatal(err)
	}
	r.Client.HSet(t.Context(), bucketKey(bucket.TokenBucket, "r", "c"), "settled", 7)
	settleOne(t, s, shard, 7, 1)
	settleOne(t, s, shard, 8, 2)
}

// settleOne settles a token and checks how often the bucket has changed then.
func settleOne(t *testing.T, s *Store, shard int, seq uint64, changes int64) {
	t.Helper()
	got, err := s.Settle(t.Context(), store.Settlement{Shard: shard, Stream: "s", Seq: seq, Boot: "b", N: seq,
		Items: []store.Item{{Client: "c", Scope: "r", Spec: still(10), Delta: bucket.One, Time: time.Now().UnixMicro()}}})
	if err != nil || got.Status != store.Applied {
		t.Fatalf("%+v, %v", got, err)
	}
	if got.Items[0].Seq != changes {
		t.Errorf("sequence %d: the bucket has changed %d times, want %d", seq, got.Items[0].Seq, changes)
	}
}

// Case 8, on Redis' own clock: callers have none, so the bound is exact whoever calls.
func TestAdmittedWithinBound(t *testing.T) {
	t.Parallel()
	r := redistest.Start(t)
	a, b := open(t, Options{Addrs: []string{r.Addr}}), open(t, Options{Addrs: []string{r.Addr}})
	spec := bucket.Spec{Kind: bucket.TokenBucket, Capacity: 150 * bucket.One, Rate: 150 * bucket.One, SlowestRate: 30 * bucket.One}
	var first, last int64
	admitted, owed := int64(0), spec.Capacity // what should be there, by the moments that Redis answered with
	for i := range 1000 {
		d, err := []*Store{a, b}[i%2].Check(t.Context(), one("c", spec))
		if err != nil {
			t.Fatal(err)
		}
		if first == 0 {
			first, last = d.Now, d.Now
		}
		owed = min(spec.Capacity, owed+(d.Now-last)*spec.Rate/bucket.One)
		last = d.Now
		want := bucket.Red
		if owed >= bucket.One {
			want, owed = bucket.Green, owed-bucket.One
		}
		if d.Tier != want {
			t.Fatalf("check %d: %v, want %v with %d micro-tokens", i, d.Tier, want, owed)
		}
		if d.Tier == bucket.Green {
			admitted++
		}
	}
	if most := spec.Capacity + (last-first)*spec.Rate/bucket.One; admitted*bucket.One > most {
		t.Errorf("admitted %d, want at most %d micro-tokens", admitted, most)
	}
}

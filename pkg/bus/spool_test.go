package bus_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
)

func spooled(dir string, fn ...func(*bus.OutboxConfig[int])) func(*bus.OutboxConfig[int]) {
	return func(c *bus.OutboxConfig[int]) {
		c.Spool, c.MaxBatch = dir, 10
		for _, f := range fn {
			f(c)
		}
	}
}

func named(id string) func(*bus.OutboxConfig[int]) {
	return func(c *bus.OutboxConfig[int]) { c.ID = id }
}

// killed is what a killed process leaves of a spool: its files as they are now, and no locks.
func killed(t *testing.T, dir string) string {
	t.Helper()
	left := t.TempDir()
	if err := os.CopyFS(left, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	return left
}

// journals lists what a spool holds.
func journals(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

// NATS is away while more is added than memory may hold; nothing is lost, and all of it is sent in order.
func TestSpoolOutlivesNATS(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, idStream())
	dir := t.TempDir()
	o := newOutbox(t, b, spooled(dir, func(c *bus.OutboxConfig[int]) { c.MaxQueued = 100 }))
	start(t, o)
	o.Add(1)
	bustest.Await(t, "an acknowledgement", func() bool { return o.Stats().Published == 1 })
	s.Stop()
	n := 1
	for range 50 {
		for range 50 {
			n++
			if !o.Add(n) {
				t.Fatal("lost")
			}
		}
		bustest.Await(t, "room in memory", func() bool { return o.Stats().Spooled > 0 && o.Waiting() == 0 })
	}
	if s := o.Stats(); s.Queued != n-1 || s.Lost != 0 || s.Full {
		t.Errorf("got %+v, want %d queued", s, n-1)
	}
	s.Restart()
	bustest.Await(t, "all to be published", func() bool { return o.Stats().Published == uint64(n) })
	delivered(t, b, n)
	if s := o.Stats(); s.Queued != 0 || s.Spooled != 0 {
		t.Errorf("got %+v, want nothing left", s)
	}
	if err := shut(t, o); err != nil {
		t.Fatal(err)
	}
	if left := journals(t, dir); len(left) > 0 {
		t.Errorf("the spool still holds %v", left)
	}
}

// Two processes in a row are killed while NATS is away. The third publishes what they left, first
// things first, each under its own id, and a batch whose acknowledgement was lost is stored once.
func TestSpoolIsAdopted(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, idStream())
	dir := t.TempDir()

	first := newOutbox(t, b, spooled(dir, named("one")))
	for i := range 25 {
		first.Add(i + 1)
	}
	if !first.Seal() {
		t.Fatal("not spooled")
	}
	unacked := killed(t, dir) // as if it had died before it heard that batch 1 was stored
	start(t, first)
	bustest.Await(t, "the first batches", func() bool { return first.Stats().Published == 25 })
	s.Stop()

	second := newOutbox(t, b, spooled(unacked, named("two"))) // adopts batch 1 of "one" once more
	start(t, second)
	for i := range 25 {
		second.Add(100 + i)
	}
	bustest.Await(t, "the spool", func() bool { return second.Stats().Spooled > 0 && second.Waiting() == 0 })
	left := killed(t, unacked)

	third := newOutbox(t, b, spooled(left, named("three")))
	if s := third.Stats(); s.Queued != 10+25 {
		t.Errorf("adopted %d items, want 35", s.Queued)
	}
	third.Add(200)
	s.Restart()
	start(t, third)
	bustest.Await(t, "all to be published", func() bool { return third.Stats().Published == 36 })

	var got, ids []string
	for _, m := range stored(t, b, "TINY") {
		var p parcel
		if err := json.Unmarshal(m.Data, &p); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, m.Header["Nats-Msg-Id"][0])
		for _, item := range p.Items {
			got = append(got, fmt.Sprint(item))
		}
	}
	want := "one-1 one-2 one-3 two-1 two-2 two-3 three-1"
	if strings.Join(ids, " ") != want {
		t.Errorf("stored %v, want %s", ids, want)
	}
	if len(got) != 51 || got[0] != "1" || got[24] != "25" || got[25] != "100" || got[50] != "200" {
		t.Errorf("items %v", got)
	}
	if j := journals(t, left); len(j) != 1 || j[0] != "three" {
		t.Errorf("the spool holds %v, want its own journal only", j)
	}
}

// Several processes died in a row: what each left is published in the order of their lives.
func TestSpoolKeepsTheOrderOfProcesses(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b, idStream())
	dir := t.TempDir()
	for i, name := range []string{"c", "a", "b"} {
		other := t.TempDir()
		o := newOutbox(t, b, spooled(other, named(name)))
		o.Add(i)
		o.Seal()
		if err := os.CopyFS(dir, os.DirFS(other)); err != nil {
			t.Fatal(err)
		}
	}
	o := newOutbox(t, b, spooled(dir, named("next")))
	start(t, o)
	bustest.Await(t, "all to be published", func() bool { return o.Stats().Published == 3 })
	for i, m := range stored(t, b, "TINY") {
		if want := []string{"c-1", "a-1", "b-1"}[i]; m.Header["Nats-Msg-Id"][0] != want {
			t.Errorf("message %d is %s, want %s", i+1, m.Header["Nats-Msg-Id"][0], want)
		}
	}
}

// What a living process holds is left alone, and so is what can't be read; a batch that was
// being written when its process died is left out.
func TestSpoolLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, idStream())
	s.Stop()
	dir := t.TempDir()
	alive := newOutbox(t, b, spooled(dir, named("alive")))
	for i := range 20 {
		alive.Add(i + 1)
	}
	alive.Seal()
	alive.Seal()
	torn := killed(t, dir)
	log := filepath.Join(torn, "alive", "00000000.log")
	info, err := os.Stat(log)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(log, info.Size()-3); err != nil {
		t.Fatal(err)
	}
	damaged := killed(t, dir)
	data, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	data[50] ^= 1 // in the first batch
	if err := os.WriteFile(filepath.Join(damaged, "alive", "00000000.log"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(torn, "strange"), 0o750); err != nil {
		t.Fatal(err)
	}
	strange := filepath.Join(torn, "strange", "00000000.log")
	if err := os.WriteFile(strange, []byte("?"), 0o600); err != nil {
		t.Fatal(err)
	}

	if o := newOutbox(t, b, spooled(dir, named("other"))); o.Stats().Queued != 0 {
		t.Errorf("adopted %d items of a living process", o.Stats().Queued)
	}
	if o := newOutbox(t, b, spooled(torn, named("next"))); o.Stats().Queued != 10 {
		t.Errorf("adopted %d items, want the whole batch of 10", o.Stats().Queued)
	}
	if o := newOutbox(t, b, spooled(damaged, named("next"))); o.Stats().Queued != 0 {
		t.Errorf("adopted %d items that are damaged", o.Stats().Queued)
	}
	if _, err := os.Stat(strange); err != nil {
		t.Error(err)
	}
}

// Beyond the bound on disk, memory takes what it may; beyond that items are lost, counted and logged.
func TestSpoolIsBounded(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, idStream())
	s.Stop()
	var logged buffer
	o := newOutbox(t, b, spooled(t.TempDir(), func(c *bus.OutboxConfig[int]) {
		c.SpoolBytes, c.MaxQueued, c.Log = 500, 20, zerolog.New(&logged)
	}))
	start(t, o)
	n := 0
	add := func() bool { n++; return o.Add(n) }
	for !o.Stats().Full {
		for range 10 {
			add()
		}
		bustest.Await(t, "the spool to take it", func() bool { return o.Waiting() == 0 || o.Stats().Full })
	}
	before := o.Stats()
	bustest.Await(t, "a loss", func() bool { return !add() })
	stats := o.Stats()
	if stats.Lost != 1 || !stats.Full || stats.Spooled > 500+200 || stats.Queued != n-1 || stats.Queued > before.Queued+20 {
		t.Errorf("got %+v after %d items, before %+v", stats, n, before)
	}
	if !strings.Contains(logged.String(), "events are lost") {
		t.Errorf("nothing was said of the loss: %s", logged.String())
	}
	s.Restart()
	bustest.Await(t, "the rest to be published", func() bool { return o.Stats().Published == uint64(n-1) })
	delivered(t, b, n-1)
}

// A disk that takes nothing makes the outbox what it is without a spool.
func TestSpoolOnABrokenDisk(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b, idStream())
	dir := t.TempDir()
	o := newOutbox(t, b, spooled(dir))
	if err := os.RemoveAll(filepath.Join(dir, "boot")); err != nil { // no segment can be made there any more
		t.Fatal(err)
	}
	start(t, o)
	for i := range 100 {
		if !o.Add(i + 1) {
			t.Fatal("lost")
		}
	}
	bustest.Await(t, "all to be published", func() bool { return o.Stats().Published == 100 })
	delivered(t, b, 100)

	if _, err := bus.NewOutbox(b, bus.OutboxConfig[int]{Subject: "tiny", ID: "x", Encode: encodeParcel, Spool: "/dev/null/x"}); err == nil {
		t.Error("a spool that can't be used must be refused at the start")
	}
}

// A stop while NATS is away leaves everything to the next process.
func TestSpoolOutlivesAStop(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, idStream())
	s.Stop()
	dir := t.TempDir()
	o := newOutbox(t, b, spooled(dir))
	start(t, o)
	for i := range 45 {
		o.Add(i + 1)
	}
	if err := o.Close(brief(t)); err == nil || o.Stats().Lost != 0 || !strings.Contains(err.Error(), "45 of them kept in the spool") {
		t.Errorf("got %v and %+v", err, o.Stats())
	}
	s.Restart()
	next := newOutbox(t, b, spooled(dir, named("next")))
	start(t, next)
	bustest.Await(t, "all to be published", func() bool { return next.Stats().Published == 45 })
	delivered(t, b, 45)
}

// Segments are left behind one by one, and read back over their ends.
func TestSpoolSegments(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	provision(t, b, idStream())
	s.Stop()
	dir := t.TempDir()
	o := newOutbox(t, b, spooled(dir, func(c *bus.OutboxConfig[int]) {
		c.Encode = func(n uint64, batch []int) ([]byte, error) {
			data, err := encodeParcel(n, batch)
			return append(data, bytes.Repeat([]byte(" "), 600<<10)...), err
		}
	}))
	start(t, o)
	for i := range 150 {
		o.Add(i + 1)
	}
	bustest.Await(t, "three segments", func() bool {
		logs, _ := filepath.Glob(filepath.Join(dir, "boot", "*.log"))
		return len(logs) == 3 && o.Waiting() == 0
	})
	s.Restart()
	bustest.Await(t, "all to be published", func() bool { return o.Stats().Published == 150 })
	delivered(t, b, 150)
	if logs, _ := filepath.Glob(filepath.Join(dir, "boot", "*.log")); len(logs) != 1 {
		t.Errorf("segments left: %v", logs)
	}
}

// buffer is safe for concurrent use.
type buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func brief(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

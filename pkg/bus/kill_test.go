package bus_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
)

// envSpool makes the test's binary a process with an outbox on that spool, and without NATS.
const envSpool = "AEGIS_TEST_SPOOL"

func TestMain(m *testing.M) {
	if dir := os.Getenv(envSpool); dir != "" {
		fmt.Println(spoolForEver(dir))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// spoolForEver adds 1, 2, 3 and so on, and says how many of them are in the spool.
func spoolForEver(dir string) error {
	b, err := bus.Connect(context.Background(), bus.Config{Name: "edge", URL: "nats://127.0.0.1:1"}, zerolog.Nop())
	if err != nil {
		return err
	}
	o, err := bus.NewOutbox(b, bus.OutboxConfig[int]{
		Subject: "tiny", ID: "killed", Encode: encodeParcel, Spool: dir, MaxBatch: 10, MaxWait: time.Millisecond, Log: zerolog.Nop(),
	})
	if err != nil {
		return err
	}
	go o.Run(context.Background())
	for n := 1; ; n++ {
		o.Add(n)
		if n%10 == 0 {
			fmt.Println(o.Sealed())
			time.Sleep(time.Millisecond)
		}
	}
}

// A process is killed with -9 while NATS is away. What was in its spool is published by the next one, in order.
func TestSpoolOutlivesKillNine(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Bus(t)
	provision(t, b, idStream())
	dir := t.TempDir()
	process := exec.CommandContext(t.Context(), os.Args[0])
	process.Env = append(os.Environ(), envSpool+"="+dir)
	process.Stderr = os.Stderr
	out, err := process.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	spooled, lines := 0, bufio.NewScanner(out)
	for lines.Scan() {
		if spooled, err = strconv.Atoi(lines.Text()); err != nil {
			t.Fatal(lines.Text())
		}
		if spooled > 500 {
			process.Process.Kill() // in the middle of whatever it does
			break
		}
	}
	process.Wait() // its error is that it was killed

	next := newOutbox(t, b, func(c *bus.OutboxConfig[int]) { c.Spool, c.ID = dir, "next" })
	found := next.Stats().Queued
	if found < spooled {
		t.Errorf("found %d items, %d were spooled", found, spooled)
	}
	start(t, next)
	bustest.Await(t, "what was left to be published", func() bool { return next.Stats().Published == uint64(found) })
	delivered(t, b, found)
}

package stack

import (
	"context"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/rs/zerolog"
)

// startRedisProcessHere needs a redis-server; scripts/redis.sh installs one where it can.
func startRedisProcessHere(t *testing.T) *redisServer {
	t.Helper()
	s, err := startRedis(t.Context(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(s.about, "redis-server") || s.died == nil {
		s.stop()
		t.Fatal("this test needs redis-server on PATH; run scripts/redis.sh")
	}
	return s
}

func pid(t *testing.T, s *redisServer) int {
	t.Helper()
	_, rest, _ := strings.Cut(s.about, "pid ")
	n, err := strconv.Atoi(strings.TrimSuffix(rest, ")"))
	if err != nil {
		t.Fatalf("no pid in %q", s.about)
	}
	return n
}

func TestRedisProcessStopsWithTheStack(t *testing.T) {
	t.Parallel()
	s := startRedisProcessHere(t)
	set(t, s.addr)
	if host, _, _ := net.SplitHostPort(s.addr); host != "127.0.0.1" {
		t.Errorf("it listens on %s, want loopback only", s.addr)
	}
	n := pid(t, s)
	if group, err := syscall.Getpgid(n); err != nil || group == syscall.Getpgrp() {
		t.Errorf("its process group is %d (%v), ours too: Ctrl-C would reach it", group, err)
	}
	s.stop()
	if err := syscall.Kill(n, 0); err == nil {
		t.Errorf("redis-server %d still runs after stop", n)
	}
	select {
	case err := <-s.died:
		t.Errorf("a stop counts as a death: %v", err)
	default:
	}
}

func TestRedisDeathIsNoticed(t *testing.T) {
	t.Parallel()
	s := startRedisProcessHere(t)
	t.Cleanup(s.stop)
	if err := syscall.Kill(pid(t, s), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-s.died:
		if !strings.Contains(err.Error(), "killed") {
			t.Errorf("died with %v, want the signal named", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("nobody noticed that Redis was killed")
	}
}

// TestPortTakenByAnotherRedis holds that a foreign server on the chosen port is never taken for ours.
func TestPortTakenByAnotherRedis(t *testing.T) {
	t.Parallel()
	other := startRedisProcessHere(t)
	t.Cleanup(other.stop)
	p := &process{exited: make(chan struct{}), died: make(chan error, 1)}
	p.cmd = &exec.Cmd{Process: &os.Process{Pid: os.Getpid()}} // anything but the other's
	if _, err := p.awaitReady(t.Context(), other.addr); err == nil || !strings.Contains(err.Error(), errPortTaken.Error()) {
		t.Errorf("awaitReady = %v, want %v", err, errPortTaken)
	}
}

func TestEmbeddedRedisExpiresKeys(t *testing.T) {
	t.Parallel()
	s, err := startMiniredis()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.stop)
	client := set(t, s.addr)
	if err := client.PExpire(context.Background(), "k", 500*time.Millisecond).Err(); err != nil {
		t.Fatal(err)
	}
	await(t, 10*time.Second, "the key to expire", func() bool {
		return client.Exists(context.Background(), "k").Val() == 0
	})
}

func set(t *testing.T, addr string) *redis.Client {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: addr})
	t.Cleanup(func() { client.Close() })
	if err := client.Set(context.Background(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	return client
}

// await polls a condition that nothing signals.
func await(t *testing.T, within time.Duration, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(within)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s in vain for %s", within, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

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

// TestRedisOfTheStack tests the Redis that a stack has on this machine: a process of its own
// where redis-server is on PATH (scripts/redis.sh sees to that where it can), else the embedded one.
func TestRedisOfTheStack(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("redis-server"); err != nil {
		s := startRedisHere(t)
		t.Cleanup(s.stop)
		if !strings.Contains(s.about, "embedded") {
			t.Errorf("it is %q", s.about)
		}
		set(t, s.addr)
		return
	}
	for name, test := range map[string]func(*testing.T){
		"stops with the stack":         redisProcessStops,
		"death is noticed":             redisDeathIsNoticed,
		"another on its port":          portTakenByAnotherRedis,
		"its death ends the stack too": redisDeathEndsTheStack,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
}

func startRedisHere(t *testing.T) *redisServer {
	t.Helper()
	s, err := startRedis(t.Context(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
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

func redisProcessStops(t *testing.T) {
	s := startRedisHere(t)
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

func redisDeathIsNoticed(t *testing.T) {
	s := startRedisHere(t)
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

// portTakenByAnotherRedis holds that a foreign server on the chosen port is never taken for ours.
func portTakenByAnotherRedis(t *testing.T) {
	other := startRedisHere(t)
	t.Cleanup(other.stop)
	p := &process{exited: make(chan struct{}), died: make(chan error, 1)}
	p.cmd = &exec.Cmd{Process: &os.Process{Pid: os.Getpid()}} // anything but the other's
	if _, err := p.awaitReady(t.Context(), other.addr); err == nil || !strings.Contains(err.Error(), errPortTaken.Error()) {
		t.Errorf("awaitReady = %v, want %v", err, errPortTaken)
	}
}

// redisDeathEndsTheStack holds that nobody is left serving from a Redis that is gone for good.
func redisDeathEndsTheStack(t *testing.T) {
	s, err := Start(t.Context(), testConfig(t, nil))
	if err != nil {
		t.Fatal(err)
	}
	s.redis.kill()
	select {
	case <-s.Done():
		if err := s.Wait(); err == nil || !strings.Contains(err.Error(), "redis-server") {
			t.Errorf("ended with %v, want Redis named", err)
		}
	case <-time.After(60 * time.Second):
		t.Error("the stack runs on")
		s.Stop()
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

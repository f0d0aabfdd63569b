package redisstore

import (
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/storetest"
)

// open is a store for tests, with a timeout that a busy machine does not reach.
func open(t testing.TB, o Options) *Store {
	t.Helper()
	o.PoolSize, o.Timeout, o.PoolTimeout, o.DialTimeout = 4, 5*time.Second, 5*time.Second, 5*time.Second
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) store.Store {
		return open(t, Options{Addrs: []string{redistest.Start(t).Addr}})
	})
}

// The embedded Redis of a machine that has no other.
func TestConformanceMiniredis(t *testing.T) {
	storetest.Run(t, func(t *testing.T) store.Store {
		return open(t, Options{Addrs: []string{miniredis.RunT(t).Addr()}})
	})
}

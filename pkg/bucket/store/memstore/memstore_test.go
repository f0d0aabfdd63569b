package memstore_test

import (
	"strconv"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/storetest"
)

func TestConformance(t *testing.T) {
	storetest.Run(t, func(*testing.T) store.Store { return memstore.New(nil) })
}

func TestScenarios(t *testing.T) {
	storetest.Scenarios(t, "../testdata", storetest.OnMemory)
}

// The memory store against the exact model alone; package redisstore runs it against Redis too.
func TestSequence(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			t.Parallel()
			storetest.Sequence(t, storetest.Seeded(seed), 5_000, storetest.OnMemory(t))
		})
	}
}

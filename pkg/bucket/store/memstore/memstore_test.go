package memstore_test

import (
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

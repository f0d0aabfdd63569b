//go:build !race

package admission_test

import (
	"testing"

	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// Cardinality attack: distinct clients beyond all that an edge can remember leave its admission below 300 MB, and
// answering. (The race detector's own memory would be measured.)
func TestCardinalityAttack(t *testing.T) {
	attack(t, 4*admission.DefaultMemory)
}

func attack(t *testing.T, clients int) {
	const most = 300 << 20
	heap := cardinality(t, clients)
	if heap > most {
		t.Errorf("%d MiB after %d clients, want less than 300", heap>>20, clients)
	}
	t.Logf("%d MiB after %d distinct clients", heap>>20, clients)
}

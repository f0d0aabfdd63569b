//go:build !race

package admission_test

import (
	"testing"

	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// Cardinality attack: distinct clients beyond all that an edge can remember leave its admission far below 300 MB, and
// answering. (The race detector's own memory would be measured.)
func TestCardinalityAttack(t *testing.T) {
	attack(t, 2*admission.DefaultMemory)
}

func attack(t *testing.T, clients int) {
	const most = 150 << 20 // the process has garbage and stored answers besides
	heap := cardinality(t, clients)
	if heap > most {
		t.Errorf("%d MiB after %d clients, want less than %d", heap>>20, clients, most>>20)
	}
	t.Logf("%d MiB after %d distinct clients", heap>>20, clients)
}

//go:build soak && !race

package admission_test

import (
	"testing"
	"time"
)

// The whole five million: TestCardinalityAttack shows the same plateau with fewer, which CI has the time for.
func TestCardinalityAttackOfFiveMillion(t *testing.T) {
	attack(t, 5_000_000)
}

// A minute of TestFleetOfProcesses.
func TestFleetOfProcessesForAMinute(t *testing.T) {
	processes(t, 20, 10, []float64{10, 5, 2, 1}, time.Minute, 0.98)
	processes(t, 300, 60, []float64{1, 1, 1, 1}, time.Minute, 0.98)
}

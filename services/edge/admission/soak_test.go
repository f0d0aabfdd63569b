//go:build soak && !race

package admission_test

import "testing"

// The whole five million: TestCardinalityAttack shows the same plateau with fewer, which CI has the time for.
func TestCardinalityAttackOfFiveMillion(t *testing.T) {
	attack(t, 5_000_000)
}

package admission_test

import (
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

func TestMultipliers(t *testing.T) {
	t.Parallel()
	now := time.Now()
	m := admission.NewMultipliers(func() time.Time { return now })
	want := func(what string, upstream string, want int64) {
		t.Helper()
		if got := m.Get(upstream); got != want {
			t.Errorf("%s: %d, want %d", what, got, want)
		}
	}
	want("unknown", "a", bucket.One)
	m.Set("a", 500_000, 0)
	m.Set("b", 1, 0)
	want("set", "a", 500_000)
	want("never below the floor", "b", bucket.FloorMultiplier)
	m.Set("b", 5*bucket.One, 0)
	want("never above one", "b", bucket.One)
	now = now.Add(15 * time.Second)
	want("at its end", "a", 500_000)
	now = now.Add(1)
	want("expired", "a", bucket.One)
	m.Set("a", 300_000, 10*time.Second)
	now = now.Add(5 * time.Second)
	want("ten seconds old at first", "a", 300_000)
	now = now.Add(1)
	want("expired the earlier", "a", bucket.One)
	m.Set("a", 300_000, time.Hour)
	want("old already", "a", bucket.One)
	m.Set("a", 300_000, -time.Hour) // the server's clock runs ahead
	now = now.Add(15*time.Second + 1)
	want("no longer than its life", "a", bucket.One)
}

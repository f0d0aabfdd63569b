package healthwatch

import (
	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// step is the multiplier that follows m, in millionths and in [r.Floor, bucket.One].
//
// It falls by the factor r.Decrease on enough samples that are too slow or fail
// too often. It rises by r.Increase when what there is, nothing included, is fast
// and clear of errors. Otherwise it stays. Falling takes r.MinSamples, rising
// none: an upstream that nobody can reach any more must recover.
func step(m int64, st stats, r policy.HealthRules) int64 {
	// A share failed/samples is compared with a rate in millionths without division.
	failed, all := int64(st.failed)*bucket.One, int64(st.samples)
	ill := st.p95 > r.SlowP95 || failed >= r.ErrorRate*all
	well := st.p95 < r.FastP95 && failed < r.ClearRate*all
	switch {
	case all == 0 || well:
		m += r.Increase
	case ill && st.samples >= r.MinSamples:
		m = m * r.Decrease / bucket.One
	}
	return min(max(m, r.Floor), bucket.One)
}

package bucket

import "fmt"

// slowFloor is the rate below which no multiplier slows a faster limit: 0.1 tokens a second.
const slowFloor = One / 10

// Effective is the limit at multiplier m (millionths, taken as within FloorMultiplier..One):
//
//	C_eff = max(1, floor(C·m))             in whole tokens; L_eff and the day's quota likewise
//	R_eff = max(floor(R·m), min(R, 0.1/s))
//	G     = floor(0.2·C)                   of the configured capacity, never above C_eff as m ≥ 0.2
//
// Limits that health does not scale (plans, daily quotas) are asked for with m = One.
func Effective(l Limit, m int64) Spec {
	m = min(max(m, FloorMultiplier), One)
	s := Spec{
		Kind:     l.Kind,
		Capacity: max(1, l.Capacity*m/One) * One,
		MaxDebt:  l.MaxDebt,
	}
	if s.MaxDebt == 0 {
		s.MaxDebt = 10 * l.Capacity * One
	}
	if l.Grace {
		s.Grace = l.Capacity / 5 * One
	}
	switch l.Kind {
	case TokenBucket:
		s.Rate = effectiveRate(l.Rate, m)
		s.SlowestRate = effectiveRate(l.Rate, FloorMultiplier)
	case SlidingWindow:
		s.Window = l.Window
	}
	return s
}

func effectiveRate(rate, m int64) int64 {
	scaled, _ := mulDiv(rate, m, One)
	return max(scaled, min(rate, slowFloor))
}

// Validate reports the first field out of range, by its name in a policy file's terms.
func (l Limit) Validate() error {
	if l.Capacity < 1 || l.Capacity > MaxTokens {
		return fmt.Errorf("capacity %d: want 1 to %d tokens", l.Capacity, MaxTokens)
	}
	if l.MaxDebt < 0 || l.MaxDebt > MaxDebt {
		return fmt.Errorf("max_debt %d: want 0 (10 × capacity) to %d micro-tokens", l.MaxDebt, int64(MaxDebt))
	}
	switch l.Kind {
	case TokenBucket:
		if l.Rate < 1 || l.Rate > MaxRate {
			return fmt.Errorf("refill_rate %d: want 1 to %d micro-tokens a second", l.Rate, int64(MaxRate))
		}
	case SlidingWindow:
		if l.Window < 1 || l.Window > MaxWindow {
			return fmt.Errorf("window_seconds %d: want 1 to %d", l.Window, MaxWindow)
		}
	case DailyQuota:
	default:
		return fmt.Errorf("kind %q: want %q, %q or %q", l.Kind, TokenBucket, SlidingWindow, DailyQuota)
	}
	return nil
}

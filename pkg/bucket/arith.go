package bucket

import "math/bits"

const (
	// second is a second in microseconds.
	second = 1_000_000
	// MaxWait bounds every time this package answers, in microseconds: 100 years, so that
	// now + MaxWait stays below 2^53.
	MaxWait = 100 * 31_557_600 * second
	// Latest is the last time that is kept, in Unix microseconds: the doubles of the Lua twin are exact to 2^53, and
	// so is then the end of the longest window after it.
	Latest = 1<<53 - 366*86_400*second
	// Never is the wait for a cost that no amount of waiting makes affordable.
	Never = -1
)

// mulDiv is floor(a·b/c) and the remainder, exact over 128 bits. a, b ≥ 0, c > 0, and the
// quotient must fit. The Lua twin splits the product instead; being exact, both agree.
func mulDiv(a, b, c int64) (quo, rem int64) {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	q, r := bits.Div64(hi, lo, uint64(c))
	return int64(q), int64(r)
}

// ceilDiv is ceil(a·b/c), under mulDiv's conditions.
func ceilDiv(a, b, c int64) int64 {
	q, r := mulDiv(a, b, c)
	if r > 0 {
		q++
	}
	return q
}

// timeFor is how long amount takes to accrue at rate, rounded up to whole microseconds,
// at most MaxWait.
func timeFor(amount, rate int64) int64 {
	if amount <= 0 {
		return 0
	}
	if amount/rate >= MaxWait/second {
		return MaxWait
	}
	return ceilDiv(amount, second, rate)
}

// floorTo rounds a ≥ 0 down to whole units of unit.
func floorTo(a, unit int64) int64 { return a - a%unit }

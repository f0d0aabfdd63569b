package bucket

// Token is a token bucket: Tokens and Grace as they were at Last. Between writes the balance
// is the line through that point, cut off at the capacity; nothing else is stored, so a check
// that writes nothing loses nothing. Twin: lua/lib/token.lua.
type Token struct {
	// Tokens is the balance, negative in debt; Grace what is left of the grace buffer; micro-tokens.
	Tokens, Grace int64
	// Last is when they were that, Unix microseconds. It never goes back.
	Last int64
}

func fullToken(s Spec, now int64) Token {
	return Token{Tokens: s.Capacity, Grace: s.Grace, Last: now}
}

// at is the bucket refilled to now. What refill would be below a micro-token stays in time:
// the result's Last is so much before now, so that a slow bucket loses less than a microsecond
// of refill (a fast one less than a micro-token) each time it is written, however often that is.
// A clock that went back refills nothing.
func (t Token) at(s Spec, now int64) Token {
	t.Tokens, t.Grace = min(t.Tokens, s.Capacity), min(t.Grace, s.Grace)
	elapsed := now - t.Last
	if elapsed <= 0 {
		return t
	}
	carry := int64(0)
	if elapsed >= timeFor(s.Capacity-t.Tokens, s.Rate) {
		t.Tokens = s.Capacity
	} else {
		gain, rem := mulDiv(elapsed, s.Rate, second)
		t.Tokens += gain
		carry = rem / s.Rate
	}
	elapsed -= carry
	if elapsed >= timeFor(5*(s.Grace-t.Grace), s.Rate) {
		t.Grace = s.Grace
	} else {
		gain, _ := mulDiv(elapsed, s.Rate, second)
		t.Grace += gain / 5
	}
	t.Last = now - carry
	return t
}

// until is how long after now the balance reaches target, if nothing is charged.
func (t Token) until(s Spec, target, now int64) int64 {
	missing := target - min(t.Tokens, s.Capacity)
	if missing <= 0 {
		return 0
	}
	return min(max(0, t.Last-now+timeFor(missing, s.Rate)), MaxWait)
}

// pass is how long after now balance and grace cover cost together at the earliest, the balance
// being out of debt; t must be at now, and refuse cost. Grace refills at a fifth of the rate. What was rounded
// down by now, less than a micro-token of each, may be there by then.
func (t Token) pass(s Spec, cost, now int64) int64 {
	after := max(
		timeFor(-t.Tokens-1, s.Rate),
		timeFor(cost-t.Tokens-s.Grace-1, s.Rate),
		timeFor(5*(cost-t.Tokens-t.Grace-2), 6*s.Rate))
	return min(max(1, t.Last-now+after), MaxWait)
}

// settle takes delta, into debt down to -MaxDebt, or gives it back, up to the capacity.
// t must be at now. forgiven is what the bound on debt let off.
func (t Token) settle(s Spec, delta int64) (_ Token, forgiven int64) {
	if delta <= 0 {
		t.Tokens = min(s.Capacity, t.Tokens-delta)
		return t, 0
	}
	taken := min(delta, max(0, t.Tokens+s.MaxDebt))
	t.Tokens -= taken
	return t, delta - taken
}

// lifetime is the time to live of a bucket written at now: until balance and grace are full at
// the slowest rate the bucket may see, and at least two minutes; from Last, where the clock has
// gone back behind it.
func (t Token) lifetime(s Spec, now int64) int64 {
	return max(0, t.Last-now) + max(120*second,
		timeFor(s.Capacity-t.Tokens, s.SlowestRate),
		timeFor(5*(s.Grace-t.Grace), s.SlowestRate))
}

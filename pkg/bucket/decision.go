package bucket

// State is what is stored of one bucket, by its kind.
type State struct {
	Kind Kind
	// Token is a token bucket's.
	Token Token
	// Window is a sliding window's or a daily quota's.
	Window Window
}

// Full is the state of a bucket that nobody has charged.
func Full(s Spec, now int64) State {
	switch s.Kind {
	case SlidingWindow:
		return State{Kind: s.Kind, Window: Window{Index: now / (s.Window * second)}}
	case DailyQuota:
		return State{Kind: s.Kind, Window: Window{Index: now / day}}
	default:
		return State{Kind: TokenBucket, Token: fullToken(s, now)}
	}
}

// At is the state brought to now: refilled, or moved to the current window.
func (st State) At(s Spec, now int64) State {
	switch st.Kind {
	case SlidingWindow:
		st.Window = st.Window.at(s.Window*second, now)
	case DailyQuota:
		st.Window = st.Window.at(day, now)
	default:
		st.Token = st.Token.at(s, now)
	}
	return st
}

// Balance is what is left to spend, negative in debt, and what is left of grace. st must be at now.
func (st State) Balance(s Spec, now int64) (balance, grace int64) {
	switch st.Kind {
	case SlidingWindow:
		return st.Window.room(s, now)
	case DailyQuota:
		return st.Window.dayRoom(s)
	default:
		return st.Token.Tokens, st.Token.Grace
	}
}

// Until is how long after now the balance reaches target if nothing more is charged, in
// microseconds; Never if target is above the capacity. It is exact for a state as stored.
func (st State) Until(s Spec, target, now int64) int64 {
	switch {
	case target > s.Capacity:
		return Never
	case st.Kind == SlidingWindow:
		return st.Window.at(s.Window*second, now).until(s, target, now)
	case st.Kind == DailyQuota:
		return st.Window.at(day, now).dayUntil(s, target, now)
	default:
		return st.Token.until(s, target, now)
	}
}

// charge takes amount and grace, which must be there. st must be at now.
func (st State) charge(amount, grace int64) State {
	if st.Kind == TokenBucket {
		st.Token.Tokens -= amount
		st.Token.Grace -= grace
	} else {
		st.Window.Cur.Amount += amount
		st.Window.Cur.Grace += grace
	}
	return st
}

// Settle takes delta from the bucket, below zero if need be, or gives it back (see Spec.MaxDebt);
// window is the one that was charged. st must be at the time of settling.
func (st State) Settle(s Spec, delta, window int64) (_ State, forgiven int64) {
	if st.Kind == TokenBucket {
		st.Token, forgiven = st.Token.settle(s, delta)
	} else {
		st.Window, forgiven = st.Window.settle(s, delta, window)
	}
	return st, forgiven
}

// Lifetime is how long a state written at now must be kept, in microseconds.
func (st State) Lifetime(s Spec, now int64) int64 {
	switch st.Kind {
	case SlidingWindow:
		return st.Window.lifetime(s, now)
	case DailyQuota:
		return st.Window.dayLifetime(now)
	default:
		return st.Token.lifetime(s, now)
	}
}

// WindowIndex is the window a charge now goes to; 0 for a token bucket. st must be at now.
func (st State) WindowIndex() int64 { return st.Window.Index }

// Entry is one of the limits that Decide decides together: its spec and state as stored before,
// and what became of it.
type Entry struct {
	Spec  Spec
	State State

	// Tier is what this limit alone would have answered.
	Tier Tier
	// Charged and GraceCharged are what the decision took; where both are 0 State is unchanged
	// and nothing is to be written.
	Charged, GraceCharged int64
	// Remaining and Grace are what is left now.
	Remaining, Grace int64
	// Wait is the time until the cost would be green by this limit, Reset until the limit is whole.
	Wait, Reset int64
	// Window is the window a charge went to, 0 for a token bucket.
	Window int64
}

// Decide decides a request of cost at now against all entries together, and charges them.
//
//   - Green: every limit has room for cost. All are charged.
//   - Yellow: only the one with grace has not, is not in debt, and its grace covers the rest.
//     Grace pays first, the balance what grace can't; nothing else is charged.
//   - Red: nothing is charged.
//
// With shadow, yellow and red pass: each limit is charged what is there, never below zero; a
// yellow one as yellow is. A cost of 0 charges nothing. Twin: lua/check.lua.
func Decide(entries []Entry, cost, now int64, shadow bool) Tier {
	var fixed [8]State // the entries' states at now; off the heap for as many as a check has
	current := append(fixed[:0], make([]State, len(entries))...)
	tier := Green
	for i := range entries {
		e := &entries[i]
		current[i] = e.State.At(e.Spec, now)
		e.Remaining, e.Grace = current[i].Balance(e.Spec, now)
		e.Tier = tierOf(e.Spec, e.Remaining, e.Grace, cost)
		tier = max(tier, e.Tier)
	}
	for i := range entries {
		e := &entries[i]
		e.Charged, e.GraceCharged = chargeOf(tier, e, cost, shadow)
		e.Window = current[i].WindowIndex()
		if e.Charged > 0 || e.GraceCharged > 0 {
			e.State = current[i].charge(e.Charged, e.GraceCharged)
			e.Remaining, e.Grace = e.State.Balance(e.Spec, now)
		}
		e.Wait = e.State.Until(e.Spec, cost, now)
		e.Reset = e.State.Until(e.Spec, e.Spec.Capacity, now)
	}
	return tier
}

func tierOf(s Spec, balance, grace, cost int64) Tier {
	switch {
	case balance >= cost:
		return Green
	case s.Grace > 0 && balance >= 0 && balance+grace >= cost:
		return Yellow
	default:
		return Red
	}
}

// chargeOf is what entry pays when the whole request is tier.
func chargeOf(tier Tier, e *Entry, cost int64, shadow bool) (amount, grace int64) {
	switch {
	case tier == Green:
		return cost, 0
	case tier == Yellow && e.Tier == Yellow:
		grace = min(e.Grace, cost)
		return cost - grace, grace
	case shadow:
		return min(cost, max(0, e.Remaining)), 0
	default:
		return 0, 0
	}
}

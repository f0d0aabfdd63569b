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

// pass is how long after now the answer to cost is red at the least, if nothing is given back; 0 if it is
// not, Never if it always is. Without grace it is Until; with grace, a lower bound of when grace could cover the rest.
func (st State) pass(s Spec, cost, now int64) int64 {
	wait := st.Until(s, cost, now)
	if s.Grace == 0 || wait == 0 {
		return wait
	}
	st = st.At(s, now)
	switch balance, grace := st.Balance(s, now); {
	case tierOf(s, balance, grace, cost) != Red:
		return 0
	case cost > s.Capacity+s.Grace:
		return Never
	}
	var yellow int64
	switch st.Kind {
	case SlidingWindow:
		yellow = st.Window.pass(s, now)
	case DailyQuota:
		yellow = (st.Window.Index+1)*day - now
	default:
		yellow = st.Token.pass(s, cost, now)
	}
	if wait == Never {
		return yellow
	}
	return min(wait, yellow)
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

// Give gives amount back, never above the capacity: to a window's current count first, then to the
// previous one's. st must be at now. Twin: lua/adjust.lua.
func (st State) Give(s Spec, amount int64) State {
	index, rest := st.Window.Index, amount-st.Window.Cur.Amount
	st, _ = st.Settle(s, -amount, index)
	if st.Kind == SlidingWindow && rest > 0 {
		st, _ = st.Settle(s, -rest, index-1)
	}
	return st
}

// Heal is the lower of a token bucket's state and one that was seen earlier, both at now; true where
// that is the one seen. Twin: lua/lib/bucket.lua.
func (st State) Heal(seen Token, s Spec, now int64) (State, bool) {
	seen, st = seen.at(s, now), st.At(s, now)
	if seen.Tokens >= st.Token.Tokens {
		return st, false
	}
	st.Token = seen
	return st, true
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
	// Charged, what was granted included, and GraceCharged are what the decision took; where both
	// are 0 State is unchanged and nothing is to be written.
	Charged, GraceCharged int64
	// Remaining and Grace are what is left now.
	Remaining, Grace int64
	// Wait is the time until the cost would be green by this limit, Reset until the limit is whole.
	Wait, Reset int64
	// Window is the window a charge went to, 0 for a token bucket.
	Window int64
}

// Request is what Decide is asked.
type Request struct {
	// Cost is in micro-tokens; 0 charges nothing.
	Cost int64
	// Want is how much a green decision may grant besides, in micro-tokens; 0: nothing. Of each
	// limit it takes at most what is left after Cost divided by Share, and whole costs only.
	Want, Share int64
	// Shadow passes yellow and red.
	Shadow bool
}

// Verdict is Decide's answer.
type Verdict struct {
	Tier Tier
	// Granted was charged to every limit besides the cost.
	Granted int64
	// Until is how long the next such request is refused at the least, if nothing is given back, in
	// microseconds; 0: it is not; Never: for good.
	Until int64
}

// Decide decides a request at now against all entries together, and charges them.
//
//   - Green: every limit has room for the cost. All are charged.
//   - Yellow: only the one with grace has not, is not in debt, and its grace covers the rest.
//     Grace pays first, the balance what grace can't; nothing else is charged.
//   - Red: nothing is charged.
//
// With shadow, yellow and red pass: each limit is charged what is there, never below zero; a
// yellow one as yellow is. Twin: lua/check.lua.
func Decide(entries []Entry, r Request, now int64) Verdict {
	var fixed [8]State // the entries' states at now; off the heap for as many as a check has
	current := append(fixed[:0], make([]State, len(entries))...)
	v := Verdict{Tier: Green, Granted: r.Want}
	for i := range entries {
		e := &entries[i]
		current[i] = e.State.At(e.Spec, now)
		e.Remaining, e.Grace = current[i].Balance(e.Spec, now)
		e.Tier = tierOf(e.Spec, e.Remaining, e.Grace, r.Cost)
		v.Tier = max(v.Tier, e.Tier)
		if r.Want > 0 {
			v.Granted = min(v.Granted, (e.Remaining-r.Cost)/r.Share)
		}
	}
	if v.Granted = max(0, v.Granted); v.Granted > 0 {
		v.Granted = floorTo(v.Granted, r.Cost)
	}
	if v.Tier != Green {
		v.Granted = 0
	}
	for i := range entries {
		e := &entries[i]
		e.Charged, e.GraceCharged = chargeOf(v.Tier, e, r.Cost+v.Granted, r.Cost, r.Shadow)
		e.Window = current[i].WindowIndex()
		if e.Charged > 0 || e.GraceCharged > 0 {
			e.State = current[i].charge(e.Charged, e.GraceCharged)
			e.Remaining, e.Grace = e.State.Balance(e.Spec, now)
		}
		e.Wait = e.State.Until(e.Spec, r.Cost, now)
		e.Reset = e.State.Until(e.Spec, e.Spec.Capacity, now)
		if v.Until != Never {
			if pass := e.State.pass(e.Spec, r.Cost, now); pass == Never {
				v.Until = Never
			} else {
				v.Until = max(v.Until, pass)
			}
		}
	}
	return v
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

// chargeOf is what entry pays for cost when the whole request is tier; green is that of a green one.
func chargeOf(tier Tier, e *Entry, green, cost int64, shadow bool) (amount, grace int64) {
	switch {
	case tier == Green:
		return green, 0
	case tier == Yellow && e.Tier == Yellow:
		grace = min(e.Grace, cost)
		return cost - grace, grace
	case shadow:
		return min(cost, max(0, e.Remaining)), 0
	default:
		return 0, 0
	}
}

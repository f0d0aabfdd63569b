package bucket

// As is the state under spec s, when it was last written under old. Where the algorithm or the
// window's length has changed, it carries over the share of the quota that is used, rounded up,
// debt included, and of grace no more than was left (from a token bucket) and nothing that was
// spent (from a window), in tokens: nobody is refilled by a switch (docs/adr/0003-algorithm-switch.md). Otherwise it is st. Twin: switch_to in lua/lib/bucket.lua.
func (st State) As(old, s Spec, now int64) State {
	if old.Kind == s.Kind && old.Window == s.Window || old.Kind == DailyQuota || s.Kind == DailyQuota {
		return st
	}
	// Time stands where the state says it is later than the clock: it never goes back.
	var used, grace int64
	if old.Kind == TokenBucket {
		now = max(now, st.Token.Last)
		t := st.Token.at(Spec{Capacity: old.Capacity, Rate: old.Rate, Grace: s.Grace}, now)
		used, grace = old.Capacity-t.Tokens, t.Grace
	} else {
		length := old.Window * second
		now = max(now, st.Window.Index*length)
		amount, spent := st.Window.at(length, now).used(length, now)
		used, grace = amount, max(0, s.Grace-spent)
	}
	used = share(used, s, old.Capacity)
	if s.Kind == TokenBucket {
		return State{Kind: s.Kind, Token: Token{Tokens: s.Capacity - used, Grace: grace, Last: now}}
	}
	return State{Kind: s.Kind, Window: Window{
		Index: now / (s.Window * second),
		// A window shows what is left of grace rounded up to whole tokens: without rounding what is
		// spent up here, every switch there and back would give a yellow answer more.
		Cur: Count{Amount: used, Grace: floorTo(s.Grace-grace+One-1, One)},
	}}
}

// share is used, of a capacity of old, in terms of s: at most its capacity and debt.
func share(used int64, s Spec, old int64) int64 {
	most := s.Capacity + s.MaxDebt
	if used/old > most/s.Capacity {
		return most
	}
	return min(most, ceilDiv(used, s.Capacity, old))
}

// WindowOf is the window that a charge to index under spec from belongs to in a state kept
// under s: the current one where the two don't number windows alike.
func (st State) WindowOf(index int64, from, s Spec) int64 {
	if from.Kind != s.Kind || from.Window != s.Window {
		return st.Window.Index
	}
	return index
}

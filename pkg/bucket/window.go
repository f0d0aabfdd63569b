package bucket

// Window is a sliding window counter: the counts of two fixed windows, the previous one
// weighted by how much of it the sliding window still covers. Twin: lua/lib/window.lua.
type Window struct {
	// Index numbers the current window: floor(time / length). It never goes back: where the
	// clock does, time stands at the start of the newest window.
	Index     int64
	Cur, Prev Count
}

// Count is what was charged in one window, in micro-tokens: against the limit and against grace.
type Count struct {
	Amount, Grace int64
}

// at moves to the window that now lies in.
func (w Window) at(length, now int64) Window {
	switch index := now / length; {
	case index <= w.Index:
	case index == w.Index+1:
		w = Window{Index: index, Prev: w.Cur}
	default:
		w = Window{Index: index}
	}
	return w
}

// left is how much of the current window is still to come; w must be at now.
func (w Window) left(length, now int64) int64 {
	return length - max(0, now-w.Index*length)
}

// used is prev·(1-ρ) + cur, of the limit and of grace; w must be at now.
func (w Window) used(length, now int64) (amount, grace int64) {
	left := w.left(length, now)
	amount, _ = mulDiv(w.Prev.Amount, left, length)
	grace, _ = mulDiv(w.Prev.Grace, left, length)
	return amount + w.Cur.Amount, grace + w.Cur.Grace
}

// room is L_eff - N, N being what is used floored to whole tokens, and the same of the grace
// buffer. The room is negative where settlements went above the limit. w must be at now.
func (w Window) room(s Spec, now int64) (room, grace int64) {
	amount, spent := w.used(s.Window*second, now)
	return s.Capacity - floorTo(amount, One), max(0, s.Grace-floorTo(spent, One))
}

// until is how long after now the room reaches target ≤ Capacity, if nothing is charged.
func (w Window) until(s Spec, target, now int64) int64 {
	if room, _ := w.room(s, now); room >= target {
		return 0
	}
	length := s.Window * second
	start := w.Index * length
	// Room reaches target when the weighted count falls below bound.
	bound := floorTo(s.Capacity-target, One) + One
	pos := falls(w.Prev.Amount, bound-w.Cur.Amount, length)
	if pos >= length { // not in this window; in the next, Cur is what fades
		pos = length + falls(w.Cur.Amount, bound, length)
	}
	return start + pos - now
}

// pass is how long after now balance or grace have a whole token more, or, of a room below zero, when it
// is zero: no answer changes before. w must be at now.
func (w Window) pass(s Spec, now int64) int64 {
	room, grace := w.room(s, now)
	if room < 0 {
		return w.until(s, 0, now)
	}
	after := int64(MaxWait)
	if room < s.Capacity {
		after = w.until(s, room+One, now)
	}
	if grace < s.Grace {
		spent := Window{Index: w.Index, Cur: Count{Amount: w.Cur.Grace}, Prev: Count{Amount: w.Prev.Grace}}
		after = min(after, spent.until(Spec{Capacity: s.Grace, Window: s.Window}, grace+One, now))
	}
	return after
}

// falls is the first position in a window at which prev·(1-ρ) < bound; length if there is none.
func falls(prev, bound, length int64) int64 {
	switch {
	case bound <= 0:
		return length
	case prev < bound:
		return 0
	}
	// prev·left < bound·length, left in whole microseconds
	return length - (ceilDiv(bound, length, prev) - 1)
}

// settle adds delta to the window that was charged, above the limit too, up to Capacity +
// MaxDebt; beyond that it is forgiven. A refund never takes a window below zero. A window
// that has left the count is not brought back; one from a faster clock counts as the current.
func (w Window) settle(s Spec, delta, index int64) (_ Window, forgiven int64) {
	c := &w.Cur
	switch {
	case index == w.Index-1:
		c = &w.Prev
	case index < w.Index-1:
		return w, 0
	}
	if delta <= 0 {
		c.Amount = max(0, c.Amount+delta)
		return w, 0
	}
	taken := min(delta, max(0, s.Capacity+s.MaxDebt-c.Amount))
	c.Amount += taken
	return w, delta - taken
}

// lifetime is the time to live of a window written at now: its counts weigh until the end of
// the next window; a minute's margin on top.
func (w Window) lifetime(s Spec, now int64) int64 {
	return max(0, w.Index*s.Window*second-now) + max(120*second, 2*s.Window*second+60*second)
}

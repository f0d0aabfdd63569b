package bucket

// day is a UTC day in microseconds.
const day = 86_400 * second

// A daily quota is a window of one UTC calendar day that starts afresh at midnight. The day
// before is kept for settlements only. Twin: lua/lib/day.lua.

// dayRoom is what is left of the day's quota and grace; w must be at now.
func (w Window) dayRoom(s Spec) (room, grace int64) {
	return s.Capacity - w.Cur.Amount, max(0, s.Grace-w.Cur.Grace)
}

// dayUntil is how long after now the quota has target left, if nothing is charged: 0 or the
// time to midnight.
func (w Window) dayUntil(s Spec, target, now int64) int64 {
	if s.Capacity-w.Cur.Amount >= target {
		return 0
	}
	return (w.Index+1)*day - now
}

// dayLifetime is the time to live of a quota just written: a day after the current day's end.
func (w Window) dayLifetime(now int64) int64 {
	return (w.Index+2)*day - now
}

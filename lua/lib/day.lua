-- day: the daily quota, a window of one UTC day that starts afresh at midnight; state and hash
-- are the sliding window's. Go twin: pkg/bucket/day.go.
local function daily_quota()
  local day = sliding_window()
  day.name, day.switches = 'daily_quota', false

  function day.length()
    return DAY
  end

  function day.balance(s, spec)
    return spec.capacity - s.amount, max(0, spec.grace - s.grace)
  end

  function day.wait(s, spec, target, now)
    s = day.at(s, spec, now)
    if spec.capacity - s.amount >= target then
      return 0
    end
    return (s.index + 1) * DAY - now
  end

  function day.pass(s, spec, _, now)
    return (day.at(s, spec, now).index + 1) * DAY - now
  end

  function day.lifetime(s, _, now)
    return (s.index + 2) * DAY - now
  end

  return day
end

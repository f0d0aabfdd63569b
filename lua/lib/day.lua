-- day: the daily quota, a window of one UTC day that starts afresh at midnight; state and hash
-- are the sliding window's. Go twin: pkg/bucket/day.go.
local day = setmetatable({}, {__index = window})

function day.length(spec)
  return DAY
end

function day.full(spec, now)
  return {index = floor(now / DAY), amount = 0, grace = 0, prev_amount = 0, prev_grace = 0}
end

function day.balance(s, spec, now)
  return spec.capacity - s.amount, max(0, spec.grace - s.grace)
end

function day.wait(s, spec, target, now)
  s = day.at(s, spec, now)
  if spec.capacity - s.amount >= target then
    return 0
  end
  return (s.index + 1) * DAY - now
end

function day.lifetime(s, spec, now)
  return (s.index + 2) * DAY - now
end

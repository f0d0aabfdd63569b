-- window: the sliding window counter. Go twin: pkg/bucket/window.go, which explains it.
-- State: {index, amount, grace, prev_amount, prev_grace}. Hash: a field per window, named by
-- its index, "<amount>:<grace>" in micro-tokens, of which the newest two count; window, the length.
local window = {}

function window.length(spec)
  return spec.window * SECOND
end

function window.full(spec, now)
  return {index = floor(now / window.length(spec)), amount = 0, grace = 0, prev_amount = 0, prev_grace = 0}
end

function window.load(h, spec)
  local newest = -1
  for field in pairs(h) do
    local index = parse_int(field)
    if index and index > newest then
      newest = index
    end
  end
  if newest < 0 then
    return nil, 'no window'
  end
  local s = {index = newest}
  for name, index in pairs({[''] = newest, prev_ = newest - 1}) do
    local text = h[int(index)] or '0:0'
    local amount, grace = string.match(text, '^(%d+):(%d+)$')
    amount, grace = parse_int(amount), parse_int(grace)
    if not amount or not grace then
      return nil, int(index) .. ': ' .. text
    end
    s[name .. 'amount'], s[name .. 'grace'] = amount, grace
  end
  return s
end

-- save(key, s, spec, h): writes the two windows; h, what was there before, tells the fields to prune.
function window.save(key, s, spec, h)
  redis.call('HSET', key, int(s.index), int(s.amount) .. ':' .. int(s.grace))
  if spec.window > 0 and h.window ~= int(spec.window) then
    redis.call('HSET', key, 'window', int(spec.window))
  end
  local oldest = s.index
  if s.prev_amount > 0 or s.prev_grace > 0 then
    oldest = s.index - 1
    redis.call('HSET', key, int(oldest), int(s.prev_amount) .. ':' .. int(s.prev_grace))
  end
  for field in pairs(h) do
    local index = parse_int(field)
    if index and index < oldest then
      redis.call('HDEL', key, field)
    end
  end
end

function window.at(s, spec, now)
  local index = floor(now / spec.algorithm.length(spec))
  if index <= s.index then
    return s
  elseif index == s.index + 1 then
    return {index = index, amount = 0, grace = 0, prev_amount = s.amount, prev_grace = s.grace}
  end
  return {index = index, amount = 0, grace = 0, prev_amount = 0, prev_grace = 0}
end

-- used(s, spec, now): what counts against the limit and against grace; s must be at now.
function window.used(s, spec, now)
  local length = window.length(spec)
  local left = length - max(0, now - s.index * length)
  local amount, grace = muldiv(s.prev_amount, left, length), muldiv(s.prev_grace, left, length)
  return amount + s.amount, grace + s.grace
end

function window.balance(s, spec, now)
  local amount, grace = window.used(s, spec, now)
  return spec.capacity - floor_to(amount, ONE), max(0, spec.grace - floor_to(grace, ONE))
end

local function falls(prev, bound, length)
  if bound <= 0 then
    return length
  elseif prev < bound then
    return 0
  end
  return length - (ceildiv(bound, length, prev) - 1)
end

function window.wait(s, spec, target, now)
  s = window.at(s, spec, now)
  if window.balance(s, spec, now) >= target then
    return 0
  end
  local length = window.length(spec)
  local bound = floor_to(spec.capacity - target, ONE) + ONE
  local position = falls(s.prev_amount, bound - s.amount, length)
  if position >= length then
    position = length + falls(s.amount, bound, length)
  end
  return s.index * length + position - now
end

function window.charge(s, amount, grace)
  return {index = s.index, amount = s.amount + amount, grace = s.grace + grace,
    prev_amount = s.prev_amount, prev_grace = s.prev_grace}
end

function window.settle(s, spec, delta, index)
  local current, previous, forgiven = s.amount, s.prev_amount, 0
  local function settled(count)
    if delta <= 0 then
      return max(0, count + delta)
    end
    local taken = min(delta, max(0, spec.capacity + spec.max_debt - count))
    forgiven = delta - taken
    return count + taken
  end
  if index >= s.index then
    current = settled(current)
  elseif index == s.index - 1 then
    previous = settled(previous)
  end
  return {index = s.index, amount = current, grace = s.grace, prev_amount = previous, prev_grace = s.prev_grace}, forgiven
end

function window.lifetime(s, spec, now)
  local length = window.length(spec)
  return max(0, s.index * length - now) + max(120 * SECOND, 2 * length + 60 * SECOND)
end

function window.window(s)
  return s.index
end

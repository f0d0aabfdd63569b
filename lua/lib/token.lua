-- token: the token bucket with grace and debt. Go twin: pkg/bucket/token.go, which explains it.
-- State: {tokens, grace, last}. Hash: tokens (decimal, six places), last_updated, grace.
local token = {}

function token.full(spec, now)
  return {tokens = spec.capacity, grace = spec.grace, last = now}
end

-- load(h, spec): the state in the hash's fields h, or nil and what is wrong.
function token.load(h, spec)
  local tokens = parse_tokens(h.tokens or '')
  if not tokens then
    return nil, 'tokens: ' .. tostring(h.tokens)
  end
  local last = parse_int(h.last_updated)
  if not last or last < 0 then
    return nil, 'last_updated: ' .. tostring(h.last_updated)
  end
  local grace = parse_int(h.grace, spec.grace)
  if not grace or grace < 0 then
    return nil, 'grace: ' .. tostring(h.grace)
  end
  return {tokens = tokens, grace = grace, last = last}
end

function token.save(key, s, spec)
  redis.call('HSET', key, 'tokens', tokens_text(s.tokens), 'last_updated', int(s.last), 'grace', int(s.grace),
    'rate', int(spec.rate))
end

function token.at(s, spec, now)
  local tokens, grace = min(s.tokens, spec.capacity), min(s.grace, spec.grace)
  local elapsed = now - s.last
  if elapsed <= 0 then
    return {tokens = tokens, grace = grace, last = s.last}
  end
  local carry = 0
  if elapsed >= time_for(spec.capacity - tokens, spec.rate) then
    tokens = spec.capacity
  else
    local gain, rem = muldiv(elapsed, spec.rate, SECOND)
    tokens = tokens + gain
    carry = floor(rem / spec.rate)
  end
  elapsed = elapsed - carry
  if elapsed >= time_for(5 * (spec.grace - grace), spec.rate) then
    grace = spec.grace
  else
    grace = grace + floor(muldiv(elapsed, spec.rate, SECOND) / 5)
  end
  return {tokens = tokens, grace = grace, last = now - carry}
end

function token.balance(s, spec, now)
  return s.tokens, s.grace
end

function token.wait(s, spec, target, now)
  local missing = target - min(s.tokens, spec.capacity)
  if missing <= 0 then
    return 0
  end
  return min(max(0, s.last - now + time_for(missing, spec.rate)), MAX_WAIT)
end

function token.charge(s, amount, grace)
  return {tokens = s.tokens - amount, grace = s.grace - grace, last = s.last}
end

function token.settle(s, spec, delta, window)
  if delta <= 0 then
    return {tokens = min(spec.capacity, s.tokens - delta), grace = s.grace, last = s.last}, 0
  end
  local taken = min(delta, max(0, s.tokens + spec.max_debt))
  return {tokens = s.tokens - taken, grace = s.grace, last = s.last}, delta - taken
end

function token.lifetime(s, spec, now)
  return max(0, s.last - now) + max(120 * SECOND, time_for(spec.capacity - s.tokens, spec.slowest),
    time_for(5 * (spec.grace - s.grace), spec.slowest))
end

function token.window(s)
  return 0
end

-- token: the token bucket with grace and debt. Go twin: pkg/bucket/token.go, which explains it.
-- State: {tokens, grace, last}. Hash: tokens (decimal, six places), last_updated, grace, rate, and reset, when an
-- administrator made it full.
local function token_bucket()
  local token = {name = 'token_bucket', switches = true}

  function token.full(spec, now)
    return {tokens = spec.capacity, grace = spec.grace, last = now}
  end

  -- read(key): the hash's fields by name, nil where there is none, or Redis' refusal.
  function token.read(key)
    local f = redis.pcall('HMGET', key, 'tokens', 'last_updated', 'grace', 'rate', 'cap', 'gen', 'seq', 'settled', 'reset')
    if f.err then
      return f
    elseif f[1] or f[2] or f[6] then
      return {tokens = f[1], last_updated = f[2], grace = f[3], rate = f[4], cap = f[5], gen = f[6],
        seq = f[7], settled = f[8], reset = f[9]}
    end
  end

  -- load(h, spec): the state in the fields h, or nil and what is wrong.
  function token.load(h, spec)
    local tokens, last, grace = parse_tokens(h.tokens), parse_int(h.last_updated), parse_int(h.grace, spec.grace)
    if not tokens then
      return nil, 'tokens: ' .. tostring(h.tokens)
    elseif not last or last < 0 or last > LATEST then
      return nil, 'last_updated: ' .. tostring(h.last_updated)
    elseif not grace or grace < 0 then
      return nil, 'grace: ' .. h.grace
    end
    return {tokens = tokens, grace = grace, last = last}
  end

  -- save(b, key, spec): stores b.state with b's place in history: what of it has changed. Redis' reply.
  function token.save(b, key, spec)
    local s, h = b.state, b.hash
    local args = {'HSET', key, 'tokens', tokens_text(s.tokens), 'last_updated', int_text(s.last), 'seq', int_text(b.seq)}
    local n = 8
    local function add(field, text)
      if h[field] ~= text then
        args[n + 1], args[n + 2], h[field] = field, text, text
        n = n + 2
      end
    end
    add('grace', int_text(s.grace))
    add('rate', spec.rate_text)
    add('cap', spec.cap_text)
    add('gen', int_text(b.gen))
    add('settled', int_text(b.settled))
    if b.reset > 0 then
      add('reset', int_text(b.reset))
    end
    return redis.pcall(unpack(args))
  end

  -- refill(missing, elapsed, rate): what accrues of missing, and the rest below a micro-token, in micro-tokens
  -- times microseconds; nil where all of it does. The rough look first keeps muldiv within its bounds.
  local function refill(missing, elapsed, rate)
    if elapsed * rate > 2 * missing * SECOND then
      return nil
    end
    local gain, rem = muldiv(elapsed, rate, SECOND)
    if gain < missing then
      return gain, rem
    end
  end

  function token.at(s, spec, now)
    local tokens, grace, last = min(s.tokens, spec.capacity), min(s.grace, spec.grace), s.last
    local elapsed = now - last
    if elapsed > 0 then
      local gain, rem = refill(spec.capacity - tokens, elapsed, spec.rate)
      last = now
      if gain then
        tokens = tokens + gain
        local carry = floor(rem / spec.rate)
        elapsed, last = elapsed - carry, now - carry
      else
        tokens = spec.capacity
      end
      gain = refill(5 * (spec.grace - grace), elapsed, spec.rate)
      grace = gain and grace + floor(gain / 5) or spec.grace
    end
    return {tokens = tokens, grace = grace, last = last}
  end

  function token.balance(s)
    return s.tokens, s.grace
  end

  function token.wait(s, spec, target, now)
    local missing = target - min(s.tokens, spec.capacity)
    if missing <= 0 then
      return 0
    end
    return min(max(0, s.last - now + time_for(missing, spec.rate)), MAX_WAIT)
  end

  -- pass(s, spec, cost, now): how long after now balance and grace cover cost together at the earliest, where they don't now.
  function token.pass(s, spec, cost, now)
    s = token.at(s, spec, now)
    local after = max(time_for(-s.tokens - 1, spec.rate), time_for(cost - s.tokens - spec.grace - 1, spec.rate),
      time_for(5 * (cost - s.tokens - s.grace - 2), 6 * spec.rate))
    return min(max(1, s.last - now + after), MAX_WAIT)
  end

  function token.charge(s, amount, grace)
    return {tokens = s.tokens - amount, grace = s.grace - grace, last = s.last}
  end

  function token.settle(s, spec, delta)
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

  function token.window()
    return 0
  end

  -- used(s, old, spec, now): how much of old's capacity is used, what is left of grace under spec, and the
  -- time that holds for: for a switch.
  function token.used(s, old, spec, now)
    now = max(now, s.last)
    local t = token.at(s, {capacity = old.capacity, rate = old.rate, grace = spec.grace}, now)
    return old.capacity - t.tokens, t.grace, now
  end

  -- switched(used, grace, spec, now): the state of which used and grace are so.
  function token.switched(used, grace, spec, now)
    return {tokens = spec.capacity - used, grace = grace, last = now}
  end

  return token
end

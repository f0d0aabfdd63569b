-- window: the sliding window counter. Go twin: pkg/bucket/window.go, which explains it.
-- State: {index, amount, grace, prev_amount, prev_grace}. Hash: a field per window, named by
-- its index, "<amount>:<grace>" in micro-tokens, of which the newest two count; window, the length.
local function sliding_window()
  local window = {name = 'sliding_window', switches = true}

  function window.length(spec)
    return spec.window * SECOND
  end

  local function empty(index)
    return {index = index, amount = 0, grace = 0, prev_amount = 0, prev_grace = 0}
  end

  function window.full(spec, now)
    return empty(floor(now / spec.algorithm.length(spec)))
  end

  function window.read(key)
    local flat = redis.pcall('HGETALL', key)
    if flat.err then
      return flat
    elseif #flat > 0 then
      local h = {}
      for i = 1, #flat, 2 do
        h[flat[i]] = flat[i + 1]
      end
      return h
    end
  end

  -- counts(h): the hash's windows by index.
  local function counts(h)
    local out, newest = {}, -1
    for field, text in pairs(h) do
      local index = parse_int(field)
      if index then
        out[index] = text
        newest = max(newest, index)
      end
    end
    return out, newest
  end

  function window.load(h, _, stored)
    local out, newest = counts(h)
    if newest < 0 then
      return nil, 'no window'
    elseif newest * stored.algorithm.length(stored) > LATEST then
      return nil, 'window: ' .. int_text(newest)
    end
    local function read(index)
      local amount, grace = string.match(out[index] or '0:0', '^(%d+):(%d+)$')
      return parse_int(amount), parse_int(grace)
    end
    local s = {index = newest}
    s.amount, s.grace = read(newest)
    s.prev_amount, s.prev_grace = read(newest - 1)
    if not (s.amount and s.grace and s.prev_amount and s.prev_grace) then
      return nil, 'windows: ' .. tostring(out[newest - 1]) .. ', ' .. tostring(out[newest])
    end
    return s
  end

  local function count_text(amount, grace)
    return string.format('%.0f:%.0f', amount, grace)
  end

  function window.save(b, key, spec)
    local s = b.state
    local args = {key, s.index, count_text(s.amount, s.grace),
      'cap', spec.capacity, 'gen', b.gen, 'seq', b.seq, 'settled', b.settled}
    local function add(field, value)
      args[#args + 1], args[#args + 2] = field, value
    end
    local oldest = s.index
    if s.prev_amount > 0 or s.prev_grace > 0 then
      oldest = s.index - 1
      add(oldest, count_text(s.prev_amount, s.prev_grace))
    end
    if spec.window > 0 then
      add('window', spec.window)
    end
    local reply = redis.pcall('HSET', unpack(args))
    if failed(reply) then
      return reply
    end
    for field in pairs(b.hash) do
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
    end
    local moved = empty(index)
    if index == s.index + 1 then
      moved.prev_amount, moved.prev_grace = s.amount, s.grace
    end
    return moved
  end

  -- weighted(s, spec, now): what counts against the limit and against grace; s must be at now.
  local function weighted(s, spec, now)
    local length = window.length(spec)
    local left = length - max(0, now - s.index * length)
    local amount, grace = muldiv(s.prev_amount, left, length), muldiv(s.prev_grace, left, length)
    return amount + s.amount, grace + s.grace
  end

  function window.balance(s, spec, now)
    local amount, grace = weighted(s, spec, now)
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

  -- pass(s, spec, cost, now): how long after now balance or grace have a whole token more, or a balance below
  -- zero is zero: no answer changes before.
  function window.pass(s, spec, _, now)
    s = window.at(s, spec, now)
    local balance, grace = window.balance(s, spec, now)
    if balance < 0 then
      return window.wait(s, spec, 0, now)
    end
    local after = MAX_WAIT
    if balance < spec.capacity then
      after = window.wait(s, spec, balance + ONE, now)
    end
    if grace < spec.grace then
      local spent = {index = s.index, amount = s.grace, grace = 0, prev_amount = s.prev_grace, prev_grace = 0}
      after = min(after, window.wait(spent, {algorithm = spec.algorithm, capacity = spec.grace, window = spec.window, grace = 0},
        grace + ONE, now))
    end
    return after
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

  function window.used(s, old, spec, now)
    now = max(now, s.index * window.length(old))
    local amount, spent = weighted(window.at(s, old, now), old, now)
    return amount, max(0, spec.grace - spent), now
  end

  function window.switched(used, grace, spec, now)
    local spent = floor_to(spec.grace - grace + ONE - 1, ONE)
    return {index = floor(now / window.length(spec)), amount = used, grace = spent, prev_amount = 0, prev_grace = 0}
  end

  return window
end

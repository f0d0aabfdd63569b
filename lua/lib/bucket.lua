-- bucket: one bucket of any kind, with its place in history. Every hash also has cap (the
-- capacity it was last written under), gen (the clock at its creation), seq (changes since) and
-- settled (last stream sequence settled into it).
-- Go twin: pkg/bucket/decision.go and switch.go; memstore for what is stored.
local algorithms = {token_bucket = token, sliding_window = window, daily_quota = day}

local SPEC = 7 -- arguments a spec takes

-- spec_at(i): the spec in ARGV[i..i+6]: kind, capacity, rate, slowest rate, window, grace, max_debt
-- (micro-tokens, micro-tokens a second, seconds).
local function spec_at(i)
  return {
    algorithm = algorithms[ARGV[i]],
    capacity = tonumber(ARGV[i + 1]),
    rate = tonumber(ARGV[i + 2]),
    slowest = tonumber(ARGV[i + 3]),
    window = tonumber(ARGV[i + 4]),
    grace = tonumber(ARGV[i + 5]),
    max_debt = tonumber(ARGV[i + 6]),
  }
end

-- same(a, b): whether specs keep a bucket alike.
local function same(a, b)
  return a.algorithm == b.algorithm and a.window == b.window
end

-- kept(stored, spec): the spec to settle an item of spec into a bucket last written under
-- stored: its own, unless the algorithm or window has been switched since.
local function kept(stored, spec)
  if same(stored, spec) then
    return spec
  end
  return {algorithm = stored.algorithm, capacity = stored.capacity, rate = stored.rate,
    slowest = max(1, floor(stored.rate / 5)), -- no slower than at the least multiplier
    grace = stored.capacity, -- the most it can be; a check cuts what is above its own
    window = stored.window, max_debt = spec.max_debt}
end

-- stored_spec(h, algorithm, spec): what the hash says it was last written under, spec's where
-- it doesn't; nil and what is wrong.
local function stored_spec(h, algorithm, spec)
  local stored = {algorithm = algorithm}
  local function read(name, field, least)
    stored[name] = parse_int(h[field], max(spec[name], least))
    return stored[name] and stored[name] >= least
  end
  if not read('capacity', 'cap', ONE) or stored.capacity > 100000000000000 then
    return nil, 'cap: ' .. h.cap
  elseif not read('rate', 'rate', algorithm == token and 1 or 0) or stored.rate > 100000000000000 then
    return nil, 'rate: ' .. h.rate
  elseif not read('window', 'window', algorithm == window and 1 or 0) or stored.window > 31 * 86400 then
    return nil, 'window: ' .. h.window
  end
  return stored
end

-- bucket_keys(i, spec): the keys a bucket may be under, from KEYS[i] on: the one of its kind
-- and, unless it is a daily quota, the one of the other kind it may be switched from; and the next i.
local function bucket_keys(i, spec)
  if spec.algorithm == day then
    return {KEYS[i]}, i + 1
  end
  return {KEYS[i], KEYS[i + 1]}, i + 2
end

-- load_bucket(keys, spec, now): the bucket as stored, full where it is absent; nil and what is
-- wrong where it can't be read.
local function load_bucket(keys, spec, now)
  local b = {key = keys[1], hash = {}, gen = 0, seq = 0, settled = 0, spec = spec}
  for i, key in ipairs(keys) do
    local flat = redis.call('HGETALL', key)
    if #flat > 0 then
      b.key = key
      for j = 1, #flat, 2 do
        b.hash[flat[j]] = flat[j + 1]
      end
      local algorithm = spec.algorithm
      if i == 2 then
        algorithm = algorithm == token and window or token
      end
      for _, field in ipairs({'gen', 'seq', 'settled'}) do
        b[field] = parse_int(b.hash[field], 0)
        if not b[field] or b[field] < 0 then
          return nil, field .. ': ' .. b.hash[field]
        end
      end
      local reason
      b.spec, reason = stored_spec(b.hash, algorithm, spec)
      if not b.spec then
        return nil, reason
      end
      b.state, reason = algorithm.load(b.hash, spec)
      if not b.state then
        return nil, reason
      end
      return b
    end
  end
  b.absent = true
  b.state = spec.algorithm.full(spec, now)
  return b
end

-- save_bucket(b, key, spec, now): stores b.state as the bucket's next change, under key and spec,
-- and its time to live. What was kept otherwise is gone with it.
local function save_bucket(b, key, spec, now)
  if not same(b.spec, spec) then
    redis.call('DEL', b.key)
    b.hash = {}
  end
  if b.gen == 0 then
    b.gen = now
  end
  b.absent, b.key, b.spec, b.seq = false, key, spec, b.seq + 1
  spec.algorithm.save(key, b.state, spec, b.hash)
  redis.call('HSET', key, 'cap', int(spec.capacity), 'gen', int(b.gen), 'seq', int(b.seq), 'settled', int(b.settled))
  redis.call('PEXPIREAT', key, int(ceil((now + spec.algorithm.lifetime(b.state, spec, now)) / 1000)))
end

-- share(used, spec, capacity): used, of capacity, in terms of spec: at most its capacity and debt.
local function share(used, spec, capacity)
  local most = spec.capacity + spec.max_debt
  if floor(used / capacity) > floor(most / spec.capacity) then
    return most
  end
  return min(most, ceildiv(used, spec.capacity, capacity))
end

-- switch_to(s, old, spec, now): the state s, kept under old, under spec: the share of the quota
-- that is used is carried over (docs/adr/0003-algorithm-switch.md).
local function switch_to(s, old, spec, now)
  if same(old, spec) then
    return s
  end
  local used, grace
  if old.algorithm == token then
    now = max(now, s.last)
    local t = token.at(s, {capacity = old.capacity, rate = old.rate, grace = spec.grace}, now)
    used, grace = old.capacity - t.tokens, t.grace
  else
    now = max(now, s.index * window.length(old))
    local spent
    used, spent = window.used(window.at(s, old, now), old, now)
    grace = max(0, spec.grace - spent)
  end
  used = share(used, spec, old.capacity)
  if spec.algorithm == token then
    return {tokens = spec.capacity - used, grace = grace, last = now}
  end
  return {index = floor(now / window.length(spec)), amount = used, grace = spec.grace - grace, prev_amount = 0, prev_grace = 0}
end

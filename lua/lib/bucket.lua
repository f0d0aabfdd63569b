-- bucket: one bucket of any kind, with its place in history. Every hash also has cap (the
-- capacity it was last written under), gen (the clock at its creation), seq (changes since) and
-- settled (last stream sequence settled into it).
-- Go twin: pkg/bucket/decision.go and switch.go; memstore for what is stored.
local makers = {token_bucket = token_bucket, sliding_window = sliding_window, daily_quota = daily_quota}
-- The algorithms, each made when a spec first names it: a script runs from its first line on every call.
local algorithms = {}
local function algorithm_of(kind)
  local a = algorithms[kind]
  if not a then
    a = makers[kind]()
    algorithms[kind] = a
  end
  return a
end

-- other(algorithm): the one that a bucket of algorithm may have been switched from.
local function other(algorithm)
  return algorithm_of(algorithm.name == 'token_bucket' and 'sliding_window' or 'token_bucket')
end

local SPEC = 7 -- arguments a spec takes

-- spec_at(i): the spec in ARGV[i..i+6]: kind, capacity, rate, slowest rate, window, grace, max_debt
-- (micro-tokens, micro-tokens a second, seconds); and, as text, what a hash under it has.
local function spec_at(i)
  return {
    algorithm = algorithm_of(ARGV[i]),
    capacity = tonumber(ARGV[i + 1]),
    rate = tonumber(ARGV[i + 2]),
    slowest = tonumber(ARGV[i + 3]),
    window = tonumber(ARGV[i + 4]),
    grace = tonumber(ARGV[i + 5]),
    max_debt = tonumber(ARGV[i + 6]),
    cap_text = ARGV[i + 1],
    rate_text = ARGV[i + 2],
    window_text = ARGV[i + 4],
  }
end

-- same(a, b): whether specs keep a bucket alike.
local function same(a, b)
  return a.algorithm == b.algorithm and a.window == b.window
end

-- as_stored(stored, spec): the spec that a bucket was last written under, where spec is not.
local function as_stored(stored, spec)
  return {algorithm = stored.algorithm, capacity = stored.capacity, rate = stored.rate,
    slowest = max(1, floor(stored.rate / 5)), -- no slower than at the least multiplier
    grace = stored.capacity, -- the most it can be; a check cuts what is above its own
    window = stored.window, max_debt = spec.max_debt, cap_text = stored.cap_text, rate_text = stored.rate_text}
end

-- kept(stored, spec): the spec to settle an item of spec into a bucket last written under
-- stored: its own, unless the algorithm or window has been switched since.
local function kept(stored, spec)
  return same(stored, spec) and spec or as_stored(stored, spec)
end

-- stored_spec(h, algorithm, spec): what the hash says it was last written under, spec's where
-- it doesn't; nil and what is wrong.
local function stored_spec(h, algorithm, spec)
  if algorithm == spec.algorithm and (h.cap or spec.cap_text) == spec.cap_text and
    (h.rate or spec.rate_text) == spec.rate_text and (h.window or spec.window_text) == spec.window_text then
    return spec -- nearly always
  end
  local stored = {algorithm = algorithm}
  local function read(name, field, least)
    stored[name] = parse_int(h[field], max(spec[name], least))
    return stored[name] and stored[name] >= least
  end
  if not read('capacity', 'cap', ONE) or stored.capacity > 100000000000000 then
    return nil, 'cap: ' .. h.cap
  elseif not read('rate', 'rate', algorithm.name == 'token_bucket' and 1 or 0) or stored.rate > 100000000000000 then
    return nil, 'rate: ' .. h.rate
  elseif not read('window', 'window', algorithm.name == 'sliding_window' and 1 or 0) or stored.window > 31 * 86400 then
    return nil, 'window: ' .. h.window
  end
  stored.cap_text, stored.rate_text = int_text(stored.capacity), int_text(stored.rate)
  return stored
end

-- load_bucket(key, before, spec, now): the bucket as stored under key, or under before, the key of the
-- algorithm it may have been switched from (nil: none); full where it is absent. Nil and what is wrong
-- where it can't be read: a text, or Redis' refusal.
local function load_bucket(key, before, spec, now)
  local algorithm = spec.algorithm
  local h = algorithm.read(key)
  if not h and before then
    local exists = redis.pcall('EXISTS', before)
    if failed(exists) then
      return nil, exists
    elseif exists == 1 then
      algorithm, key = other(algorithm), before
      h = algorithm.read(key)
    end
  end
  if not h then
    return {key = key, absent = true, hash = {}, gen = 0, seq = 0, settled = 0, reset = 0, spec = spec,
      state = spec.algorithm.full(spec, now)}
  elseif failed(h) then
    return nil, h
  end
  local gen, seq, settled = parse_int(h.gen, 0), parse_int(h.seq, 0), parse_int(h.settled, 0)
  if not (gen and seq and settled) or gen < 0 or seq < 0 or settled < 0 then
    return nil, 'gen, seq, settled: ' .. tostring(h.gen) .. ', ' .. tostring(h.seq) .. ', ' .. tostring(h.settled)
  end
  local stored, reason = stored_spec(h, algorithm, spec)
  if not stored then
    return nil, reason
  end
  local state
  state, reason = algorithm.load(h, spec, stored)
  if not state then
    return nil, reason
  end
  return {key = key, hash = h, gen = gen, seq = seq, settled = settled, reset = parse_int(h.reset, 0) or 0,
    spec = stored, state = state}
end

-- heal(b, seen, spec, now): goes on from what was seen of a token bucket, {tokens, grace, last, gen, seq,
-- settled}, if that is lower and b is not what followed it; whether it did. Twin: bucket.State.Heal,
-- memstore.Bucket.heal.
local function heal(b, seen, spec, now)
  if not same(b.spec, spec) or b.gen == seen.gen and b.seq >= seen.seq or seen.last <= b.reset then
    return false
  end
  local carried, current = spec.algorithm.at(seen, spec, now), spec.algorithm.at(b.state, spec, now)
  if carried.tokens >= current.tokens then
    return false
  end
  b.state, b.gen, b.seq, b.settled = carried, seen.gen, seen.seq, seen.settled
  return true
end

-- save_bucket(b, key, spec, now): stores b.state as the bucket's next change, under key and spec,
-- and its time to live; nil, or Redis' refusal of the first write, where nothing was changed. What was kept
-- otherwise is gone with it. A full Redis refuses only what a script enlarges before it has changed
-- anything: so a bucket that is there goes on, as its time to live is set first.
local function save_bucket(b, key, spec, now)
  local new, refusal = b.absent, nil
  if not same(b.spec, spec) then
    refusal = redis.pcall('DEL', b.key)
    b.hash, new = {}, true
  end
  if b.gen == 0 then
    b.gen = now
  end
  b.absent, b.key, b.seq = false, key, b.seq + 1
  local expires = ceil(min(now + spec.algorithm.lifetime(b.state, spec, now), LATEST) / 1000)
  if not new then
    refusal = redis.pcall('PEXPIREAT', key, expires)
  end
  if failed(refusal) then
    return refusal
  end
  refusal = spec.algorithm.save(b, key, spec)
  if failed(refusal) then
    return refusal
  end
  b.spec = spec
  if new then
    redis.call('PEXPIREAT', key, expires)
  end
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
  local used, grace, at = old.algorithm.used(s, old, spec, now)
  return spec.algorithm.switched(share(used, spec, old.capacity), grace, spec, at)
end

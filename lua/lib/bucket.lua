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
-- (micro-tokens, micro-tokens a second, seconds).
local function spec_at(i)
  return {
    algorithm = algorithm_of(ARGV[i]),
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
  elseif not read('rate', 'rate', algorithm.name == 'token_bucket' and 1 or 0) or stored.rate > 100000000000000 then
    return nil, 'rate: ' .. h.rate
  elseif not read('window', 'window', algorithm.name == 'sliding_window' and 1 or 0) or stored.window > 31 * 86400 then
    return nil, 'window: ' .. h.window
  end
  return stored
end

-- bucket_keys(i, spec): the keys a bucket may be under, from KEYS[i] on: the one of its kind
-- and, unless it is a daily quota, the one of the other kind it may be switched from; and the next i.
local function bucket_keys(i, spec)
  if spec.algorithm.name == 'daily_quota' then
    return {KEYS[i]}, i + 1
  end
  return {KEYS[i], KEYS[i + 1]}, i + 2
end

-- load_bucket(keys, spec, now): the bucket as stored, full where it is absent; nil and what is
-- wrong where it can't be read.
local function load_bucket(keys, spec, now)
  local b = {key = keys[1], hash = spec.algorithm.read(keys[1]), gen = 0, seq = 0, settled = 0, spec = spec}
  local algorithm = spec.algorithm
  if not b.hash and keys[2] and redis.call('EXISTS', keys[2]) == 1 then
    algorithm = other(algorithm)
    b.key = keys[2]
    b.hash = algorithm.read(b.key)
  end
  if not b.hash then
    b.absent, b.hash = true, {}
    b.state = spec.algorithm.full(spec, now)
    return b
  end
  local h = b.hash
  b.gen, b.seq, b.settled = parse_int(h.gen, 0), parse_int(h.seq, 0), parse_int(h.settled, 0)
  if not (b.gen and b.seq and b.settled) or b.gen < 0 or b.seq < 0 or b.settled < 0 then
    return nil, 'gen, seq, settled: ' .. tostring(h.gen) .. ', ' .. tostring(h.seq) .. ', ' .. tostring(h.settled)
  end
  local reason
  b.spec, reason = stored_spec(h, algorithm, spec)
  if b.spec then
    b.state, reason = algorithm.load(h, spec)
  end
  if not b.state then
    return nil, reason
  end
  return b
end

-- save_bucket(b, key, spec, now): stores b.state as the bucket's next change, under key and spec,
-- and its time to live. What was kept otherwise is gone with it. A full Redis refuses only what a script
-- enlarges before it has changed anything: so a bucket that is there goes on, as its time to live is set first.
local function save_bucket(b, key, spec, now)
  local new = b.absent
  if not same(b.spec, spec) then
    redis.call('DEL', b.key)
    b.hash, new = {}, true
  end
  if b.gen == 0 then
    b.gen = now
  end
  b.absent, b.key, b.spec, b.seq = false, key, spec, b.seq + 1
  local expires = ceil((now + spec.algorithm.lifetime(b.state, spec, now)) / 1000)
  if not new then
    redis.call('PEXPIREAT', key, expires)
  end
  spec.algorithm.save(b, key, spec)
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

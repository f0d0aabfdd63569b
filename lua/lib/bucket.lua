-- bucket: one bucket of any kind, with its place in history. Every hash also has gen (the
-- clock at its creation), seq (changes since) and settled (last stream sequence settled into it).
-- Go twin: pkg/bucket/decision.go (State), and memstore for what is stored.
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

-- load_bucket(key, spec, now): the bucket as stored, full where it is absent; nil and what is
-- wrong where it can't be read.
local function load_bucket(key, spec, now)
  local b = {key = key, spec = spec, hash = {}, gen = 0, seq = 0, settled = 0}
  local flat = redis.call('HGETALL', key)
  if #flat == 0 then
    b.absent = true
    b.state = spec.algorithm.full(spec, now)
    return b
  end
  for i = 1, #flat, 2 do
    b.hash[flat[i]] = flat[i + 1]
  end
  for _, field in ipairs({'gen', 'seq', 'settled'}) do
    b[field] = parse_int(b.hash[field], 0)
    if not b[field] then
      return nil, field .. ': ' .. b.hash[field]
    end
  end
  local reason
  b.state, reason = spec.algorithm.load(b.hash, spec)
  if not b.state then
    return nil, reason
  end
  return b
end

-- save_bucket(b, now): stores b.state as the bucket's next change, and its time to live.
local function save_bucket(b, now)
  if b.gen == 0 then
    b.gen = now
  end
  b.absent = false
  b.seq = b.seq + 1
  b.spec.algorithm.save(b.key, b.state, b.spec, b.hash)
  redis.call('HSET', b.key, 'gen', int(b.gen), 'seq', int(b.seq), 'settled', int(b.settled))
  redis.call('PEXPIREAT', b.key, int(ceil((now + b.spec.algorithm.lifetime(b.state, b.spec, now)) / 1000)))
end

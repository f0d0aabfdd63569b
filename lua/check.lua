-- check: decides requests in turn, each against up to four buckets of its client together, and charges them.
--
-- KEYS     per request its buckets, one per limit; after each, unless a daily quota, its key under the
--          other algorithm
-- ARGV     how many specs, the specs (lib/bucket.lua), then per request: cost (micro-tokens), shadow
--          (0 or 1), how many limits, and the place of each limit's spec, from 1
-- Units    micro-tokens, microseconds, Unix microseconds
-- Returns  now, then per request an error's text, or a list: tier (0 green, 1 yellow, 2 red), then per limit
--          its own tier, remaining, grace, wait (-1: never), reset, charged, grace charged, window, gen,
--          seq, settled
-- Errors   STATE <limit> <reason>: that bucket can't be read. Also Redis' own, where it refuses to read or
--          write. A request with an error changed nothing; the others go on. READONLY is the whole call's
--          error: a replica has decided nothing, and the client drops a connection that says so
-- Go twin  bucket.Decide; memstore.Store.Check
--
-- What is charged nothing is not written: a refill that was only looked at is still due. Except that
-- the first check (no peek) under another algorithm than the bucket's stores it as switched.
local GREEN, YELLOW, RED = 0, 1, 2

local now = clock()
local keys, args = 1, 2 -- the next of KEYS and ARGV

local specs = {}
for i = 1, tonumber(ARGV[1]) do
  specs[i] = spec_at(args)
  args = args + SPEC
end

local function tier_of(b, spec, cost)
  if b.balance >= cost then
    return GREEN
  elseif spec.grace > 0 and b.balance >= 0 and b.balance + b.grace >= cost then
    return YELLOW
  end
  return RED
end

-- charge_of(tier, b, cost, shadow): what b pays, and what its grace pays, when the whole request is tier.
local function charge_of(tier, b, cost, shadow)
  if tier == GREEN then
    return cost, 0
  elseif tier == YELLOW and b.tier == YELLOW then
    local grace = min(b.grace, cost)
    return cost - grace, grace
  elseif shadow then
    return min(cost, max(0, b.balance)), 0
  end
  return 0, 0
end

-- decide(cost, shadow, wanted): the reply to a request whose limits are wanted, from the keys of the first on.
local function decide(cost, shadow, wanted)
  local buckets, tier, k = {}, GREEN, keys
  for i, spec in ipairs(wanted) do
    local key, before = KEYS[k], spec.algorithm.switches and KEYS[k + 1]
    k = k + (before and 2 or 1)
    local b, reason = load_bucket(key, before, spec, now)
    if not b then
      return failed(reason) and reason.err or 'STATE ' .. (i - 1) .. ' ' .. reason
    end
    b.wanted = key
    b.switched = not same(b.spec, spec)
    b.state = switch_to(b.state, b.spec, spec, now)
    b.current = spec.algorithm.at(b.state, spec, now)
    b.balance, b.grace = spec.algorithm.balance(b.current, spec, now)
    b.tier = tier_of(b, spec, cost)
    tier = max(tier, b.tier)
    buckets[i] = b
  end

  local reply, n = {tier}, 1
  for i, b in ipairs(buckets) do
    local spec = wanted[i]
    local algorithm = spec.algorithm
    local amount, grace = charge_of(tier, b, cost, shadow)
    if amount > 0 or grace > 0 then
      b.state = algorithm.charge(b.current, amount, grace)
      b.balance, b.grace = algorithm.balance(b.state, spec, now)
    end
    if amount > 0 or grace > 0 or b.switched and cost > 0 then
      local refusal = save_bucket(b, b.wanted, spec, now)
      if refusal then
        return refusal.err
      end
    end
    reply[n + 1], reply[n + 2], reply[n + 3] = b.tier, b.balance, b.grace
    reply[n + 4] = b.balance >= cost and 0 or cost > spec.capacity and NEVER or algorithm.wait(b.state, spec, cost, now)
    reply[n + 5] = algorithm.wait(b.state, spec, spec.capacity, now)
    reply[n + 6], reply[n + 7], reply[n + 8] = amount, grace, algorithm.window(b.current)
    reply[n + 9], reply[n + 10], reply[n + 11] = b.gen, b.seq, b.settled
    n = n + 11
  end
  return reply
end

local replies, n = {now}, 1
while args <= #ARGV do
  local cost, shadow, limits = tonumber(ARGV[args]), ARGV[args + 1] == '1', tonumber(ARGV[args + 2])
  local wanted, taken = {}, 0
  for i = 1, limits do
    wanted[i] = specs[tonumber(ARGV[args + 2 + i])]
    taken = taken + (wanted[i].algorithm.switches and 2 or 1)
  end
  local reply = decide(cost, shadow, wanted)
  if type(reply) == 'string' and string.sub(reply, 1, 8) == 'READONLY' then
    return redis.error_reply(reply)
  end
  n = n + 1
  replies[n] = reply
  keys, args = keys + taken, args + 3 + limits
end
return replies

-- check: decides one request against up to four buckets of a client together, and charges them.
--
-- KEYS     the buckets, one per limit; after each, unless a daily quota, its key under the other algorithm
-- ARGV     cost (micro-tokens), shadow (0 or 1), then per limit a spec (lib/bucket.lua)
-- Units    micro-tokens, microseconds, Unix microseconds
-- Returns  tier (0 green, 1 yellow, 2 red), now, then per limit: its own tier, remaining, grace,
--          wait (-1: never), reset, charged, grace charged, window, gen, seq, settled
-- Errors   STATE <limit> <reason>: that bucket can't be read; nothing was changed
-- Go twin  bucket.Decide; memstore.Store.Check
--
-- What is charged nothing is not written: a refill that was only looked at is still due. Except that
-- the first check (no peek) under another algorithm than the bucket's stores it as switched.
local GREEN, YELLOW, RED = 0, 1, 2

local cost, shadow = tonumber(ARGV[1]), ARGV[2] == '1'
local now = clock()

local function tier_of(b)
  if b.balance >= cost then
    return GREEN
  elseif b.wanted.spec.grace > 0 and b.balance >= 0 and b.balance + b.grace >= cost then
    return YELLOW
  end
  return RED
end

-- charge_of(tier, b): what b pays, and what its grace pays, when the whole request is tier.
local function charge_of(tier, b)
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

local buckets, tier, k = {}, GREEN, 1
while k <= #KEYS do
  local i = #buckets + 1
  local spec = spec_at(3 + (i - 1) * SPEC)
  local keys
  keys, k = bucket_keys(k, spec)
  local b, reason = load_bucket(keys, spec, now)
  if not b then
    return redis.error_reply('STATE ' .. (i - 1) .. ' ' .. reason)
  end
  b.wanted = {key = keys[1], spec = spec}
  b.switched = not same(b.spec, spec)
  b.state = switch_to(b.state, b.spec, spec, now)
  b.current = spec.algorithm.at(b.state, spec, now)
  b.balance, b.grace = spec.algorithm.balance(b.current, spec, now)
  b.tier = tier_of(b)
  tier = max(tier, b.tier)
  buckets[i] = b
end

local reply, n = {tier, now}, 2
for _, b in ipairs(buckets) do
  local spec = b.wanted.spec
  local algorithm = spec.algorithm
  local amount, grace = charge_of(tier, b)
  if amount > 0 or grace > 0 then
    b.state = algorithm.charge(b.current, amount, grace)
    b.balance, b.grace = algorithm.balance(b.state, spec, now)
  end
  if amount > 0 or grace > 0 or b.switched and cost > 0 then
    save_bucket(b, b.wanted.key, spec, now)
  end
  reply[n + 1], reply[n + 2], reply[n + 3] = b.tier, b.balance, b.grace
  reply[n + 4] = cost > spec.capacity and NEVER or algorithm.wait(b.state, spec, cost, now)
  reply[n + 5] = algorithm.wait(b.state, spec, spec.capacity, now)
  reply[n + 6], reply[n + 7], reply[n + 8] = amount, grace, algorithm.window(b.current)
  reply[n + 9], reply[n + 10], reply[n + 11] = b.gen, b.seq, b.settled
  n = n + 11
end
return reply

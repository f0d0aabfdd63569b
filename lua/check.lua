-- check: decides requests in turn, each against up to four buckets of its client together, and charges them.
--
-- KEYS     per request its buckets, one per limit; after each, unless a daily quota, its key under the
--          other algorithm
-- ARGV     how many specs, the specs (lib/bucket.lua), then per request: cost (micro-tokens), mode (0 plain,
--          1 shadow, 2 with a grant: then want and share follow, see bucket.Request), how many limits, and the
--          place of each limit's spec, from 1; below zero where what was seen of its bucket follows (a
--          token bucket's): gen, seq, tokens, grace, time, settled (store.Seen)
-- Units    micro-tokens, microseconds, Unix microseconds
-- Returns  now, then per request an error's text, or a list: tier (0 green, 1 yellow, 2 red), granted, for how
--          long the next such request is refused (at the least; 0: it is not, -1: always), then per limit
--          its own tier, remaining, grace, wait (-1: never), reset, charged, grace charged, window, gen,
--          seq, settled, healed (0 or 1)
-- Errors   STATE <limit> <reason>: that bucket can't be read. Also Redis' own, where it refuses to read or
--          write. A request with an error changed nothing; the others go on. READONLY is the whole call's
--          error: a replica has decided nothing, and the client drops a connection that says so
-- Go twin  bucket.Decide; memstore.Store.Check
--
-- What is charged nothing is not written: a refill that was only looked at is still due. Except that
-- the first check (no peek) under another algorithm than the bucket's stores it as switched, and that one
-- which heals lost state (lib/bucket.lua) stores that.
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

-- charge_of(tier, b, cost, granted, shadow): what b pays, and what its grace pays, when the whole request is tier.
local function charge_of(tier, b, cost, granted, shadow)
  if tier == GREEN then
    return cost + granted, 0
  elseif tier == YELLOW and b.tier == YELLOW then
    local grace = min(b.grace, cost)
    return cost - grace, grace
  elseif shadow then
    return min(cost, max(0, b.balance)), 0
  end
  return 0, 0
end

-- refused_for(b, spec, cost, wait): for how long b alone refuses the next such request, at the least.
local function refused_for(b, spec, cost, wait)
  if spec.grace == 0 or wait == 0 then
    return wait
  elseif tier_of(b, spec, cost) ~= RED then
    return 0
  elseif cost > spec.capacity + spec.grace then
    return NEVER
  end
  local yellow = spec.algorithm.pass(b.state, spec, cost, now)
  return wait == NEVER and yellow or min(wait, yellow)
end

-- decide(cost, shadow, want, among, wanted, seen): the reply to a request whose limits are wanted, from the keys
-- of the first on; seen is what was seen of each, or false.
local function decide(cost, shadow, want, among, wanted, seen)
  local buckets, tier, granted, k = {}, GREEN, want, keys
  for i, spec in ipairs(wanted) do
    local key, before = KEYS[k], spec.algorithm.switches and KEYS[k + 1]
    k = k + (before and 2 or 1)
    local b, reason = load_bucket(key, before, spec, now)
    if not b then
      return failed(reason) and reason.err or 'STATE ' .. (i - 1) .. ' ' .. reason
    end
    b.wanted = key
    b.healed = seen[i] and heal(b, seen[i], spec, now)
    b.switched = not same(b.spec, spec)
    b.state = switch_to(b.state, b.spec, spec, now)
    b.current = spec.algorithm.at(b.state, spec, now)
    b.balance, b.grace = spec.algorithm.balance(b.current, spec, now)
    b.tier = tier_of(b, spec, cost)
    tier = max(tier, b.tier)
    if want > 0 then
      granted = min(granted, floor((b.balance - cost) / among))
    end
    buckets[i] = b
  end
  granted = tier == GREEN and granted > 0 and floor_to(granted, cost) or 0

  local reply, n, held = {tier, granted, 0}, 3, 0
  for i, b in ipairs(buckets) do
    local spec = wanted[i]
    local algorithm = spec.algorithm
    local amount, grace = charge_of(tier, b, cost, granted, shadow)
    if amount > 0 or grace > 0 then
      b.state = algorithm.charge(b.current, amount, grace)
      b.balance, b.grace = algorithm.balance(b.state, spec, now)
    end
    if amount > 0 or grace > 0 or (b.switched or b.healed) and cost > 0 then
      local refusal = save_bucket(b, b.wanted, spec, now)
      if refusal then
        return refusal.err
      end
    end
    reply[n + 1], reply[n + 2], reply[n + 3] = b.tier, b.balance, b.grace
    local wait = b.balance >= cost and 0 or cost > spec.capacity and NEVER or algorithm.wait(b.state, spec, cost, now)
    if held ~= NEVER then
      local alone = refused_for(b, spec, cost, wait)
      held = alone == NEVER and NEVER or max(held, alone)
    end
    reply[n + 4] = wait
    reply[n + 5] = algorithm.wait(b.state, spec, spec.capacity, now)
    reply[n + 6], reply[n + 7], reply[n + 8] = amount, grace, algorithm.window(b.current)
    reply[n + 9], reply[n + 10], reply[n + 11] = b.gen, b.seq, b.settled
    reply[n + 12] = b.healed and 1 or 0
    n = n + 12
  end
  reply[3] = held
  return reply
end

local replies, n = {now}, 1
while args <= #ARGV do
  local cost, mode, want, among = tonumber(ARGV[args]), ARGV[args + 1], 0, 1
  args = args + 2
  if mode == '2' then
    want, among = tonumber(ARGV[args]), tonumber(ARGV[args + 1])
    args = args + 2
  end
  local limits, wanted, seen, taken = tonumber(ARGV[args]), {}, {}, 0
  for i = 1, limits do
    args = args + 1
    local place = tonumber(ARGV[args])
    if place < 0 then
      seen[i] = {gen = tonumber(ARGV[args + 1]), seq = tonumber(ARGV[args + 2]), tokens = tonumber(ARGV[args + 3]),
        grace = tonumber(ARGV[args + 4]), last = tonumber(ARGV[args + 5]), settled = tonumber(ARGV[args + 6])}
      place, args = -place, args + 6
    end
    wanted[i] = specs[place]
    taken = taken + (wanted[i].algorithm.switches and 2 or 1)
  end
  local reply = decide(cost, mode == '1', want, among, wanted, seen)
  if type(reply) == 'string' and string.sub(reply, 1, 8) == 'READONLY' then
    return redis.error_reply(reply)
  end
  n = n + 1
  replies[n] = reply
  keys, args = keys + taken, args + 1
end
return replies

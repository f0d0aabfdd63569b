-- settle: applies one message of the response stream to one shard, exactly once.
--
-- KEYS     the shard's meta, then per item its bucket and, unless a daily quota, its key under the
--          other algorithm. An item goes to the bucket as it is kept now
-- ARGV     stream, prev, seq, boot ('' advances the cursor only), n, oldest, then per item:
--          a spec (lib/bucket.lua), delta (micro-tokens; negative gives back), window charged,
--          time of the charge (Unix microseconds)
-- Returns  status, cursor, then if applied per item: remaining, forgiven, gen, seq.
--          lost: no epoch, or another stream's. rewind: the cursor is before prev. behind: it is at
--          seq or later. Those changed nothing. duplicate: the boot's counter is at n or later;
--          only the cursor advanced. applied: everything did
-- Errors   STATE <item> <reason>: that bucket can't be read; nothing was changed
-- Go twin  bucket.State.Settle; memstore.Store.Settle
--
-- A bucket's settled counts on over streams, from the meta's base (begin.lua).
--
-- Mark (cursor, counter b:<boot> = "<n>:<seq>") and effect are one step, and the mark does not
-- expire: a settlement that is repeated finds it.
local ITEM = SPEC + 3 -- arguments an item takes

local meta = KEYS[1]
local stream, boot = ARGV[1], ARGV[4]
local prev, seq, n, oldest = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[5]), tonumber(ARGV[6])

local m = redis.call('HMGET', meta, 'epoch', 'stream', 'cursor', 'b:' .. boot, 'base')
local cursor = tonumber(m[3] or '0')
local place = tonumber(m[5] or '0') + seq
if not m[1] or m[2] ~= stream then
  return {'lost', cursor}
elseif cursor < prev then
  return {'rewind', cursor}
elseif seq <= cursor then
  return {'behind', cursor}
end

local now = clock()
local status, items = 'applied', {}
if boot ~= '' then
  local counted = tonumber(string.match(m[4] or '0:0', '^(%d+):'))
  if n <= counted then
    status, n = 'duplicate', counted
  else
    local known, k = {}, 2 -- a bucket may have several items: one per window, or per algorithm
    while k <= #KEYS do
      local i = #items + 1
      local at = 7 + (i - 1) * ITEM
      local spec = spec_at(at)
      local key, before = KEYS[k], spec.algorithm.switches and KEYS[k + 1]
      k = k + (before and 2 or 1)
      local b = known[key]
      if not b then
        local reason
        b, reason = load_bucket(key, before, spec, now)
        if not b then
          return failed(reason) and reason or redis.error_reply('STATE ' .. (i - 1) .. ' ' .. reason)
        end
        b.due = b.settled < place
        known[key] = b
        if before then
          known[before] = b
        end
      end
      items[i] = {bucket = b, spec = spec, delta = tonumber(ARGV[at + SPEC]), window = tonumber(ARGV[at + SPEC + 1]),
        time = tonumber(ARGV[at + SPEC + 2])}
    end
  end
end

-- A full Redis refuses what a script enlarges before it has changed anything: this changes nothing, and lets
-- settlement go on.
redis.call('PERSIST', meta)

local reply = {status, seq}
for _, item in ipairs(items) do
  local b, forgiven = item.bucket, 0
  local spec = kept(b.spec, item.spec)
  local algorithm = spec.algorithm
  -- an absent bucket was full when it was charged
  b.state = b.absent and algorithm.full(spec, min(item.time, now)) or algorithm.at(b.state, spec, now)
  if b.due then
    local index = same(spec, item.spec) and item.window or algorithm.window(b.state)
    b.state, forgiven = algorithm.settle(b.state, spec, item.delta, index)
    b.state = algorithm.at(b.state, spec, now)
    b.settled = place
    local refusal = save_bucket(b, b.key, spec, now)
    if refusal then
      return refusal
    end
  end
  reply[#reply + 1] = (algorithm.balance(b.state, spec, now))
  reply[#reply + 1] = forgiven
  reply[#reply + 1] = b.gen
  reply[#reply + 1] = b.seq
end

redis.call('HSET', meta, 'cursor', seq)
if boot ~= '' then
  redis.call('HSET', meta, 'b:' .. boot, string.format('%.0f:%.0f', n, seq))
end
if oldest > 0 then
  local flat = redis.call('HGETALL', meta)
  for i = 1, #flat, 2 do
    local last = string.match(flat[i + 1], ':(%d+)$')
    if string.sub(flat[i], 1, 2) == 'b:' and tonumber(last) < oldest then
      redis.call('HDEL', meta, flat[i])
    end
  end
end
return reply

-- return: gives back what a check granted and nobody spent, to each bucket that was charged.
--
-- KEYS     the buckets; after each, unless a daily quota, its key under the other algorithm
-- ARGV     amount (micro-tokens), then per limit a spec (lib/bucket.lua), the window charged and the bucket's gen
-- Returns  how many buckets took it. One that is gone, was made anew, is kept under another algorithm or was cut
--          to a lower capacity does not: the amount has no place there
-- Errors   STATE <limit> <reason>: that bucket can't be read; nothing was changed
-- Go twin  memstore.Store.Return
local LIMIT = SPEC + 2 -- arguments a limit takes

local amount = tonumber(ARGV[1])
local now = clock()
local buckets, k = {}, 1
while k <= #KEYS do
  local i = #buckets + 1
  local at = 2 + (i - 1) * LIMIT
  local spec = spec_at(at)
  local key, before = KEYS[k], spec.algorithm.switches and KEYS[k + 1]
  k = k + (before and 2 or 1)
  local b, reason = load_bucket(key, before, spec, now)
  if not b then
    return failed(reason) and reason or redis.error_reply('STATE ' .. (i - 1) .. ' ' .. reason)
  end
  b.wanted, b.window, b.charged = spec, tonumber(ARGV[at + SPEC]), tonumber(ARGV[at + SPEC + 1])
  buckets[i] = b
end
local took = 0
for _, b in ipairs(buckets) do
  local spec = b.wanted
  if not b.absent and b.gen == b.charged and same(b.spec, spec) and b.spec.capacity >= spec.capacity then
    if b.spec.capacity ~= spec.capacity or b.spec.rate ~= spec.rate then
      spec = as_stored(b.spec, spec)
    end
    b.state = spec.algorithm.settle(spec.algorithm.at(b.state, spec, now), spec, -amount, b.window)
    local refusal = save_bucket(b, b.key, spec, now)
    if refusal then
      return refusal
    end
    took = took + 1
  end
end
return {took}

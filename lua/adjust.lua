-- adjust: what an administrator does to one bucket: a reset, or a grant.
--
-- KEYS     the bucket and, unless a daily quota, its key under the other algorithm
-- ARGV     'reset' or 'grant', what is granted (micro-tokens), then a spec (lib/bucket.lua)
-- Returns  remaining (micro-tokens), gen, seq
-- Errors   STATE 0 <reason>: the bucket can't be read; nothing was changed. A reset cures that
-- Go twin  bucket.State.Give; memstore.Store.Adjust
--
-- A reset is a new generation: what edges carry of the old one must not heal it away. settled stays, so
-- that nothing is settled again.
local reset, amount = ARGV[1] == 'reset', tonumber(ARGV[2])
local now = clock()
local spec = spec_at(3)
local algorithm = spec.algorithm
local key, before = KEYS[1], algorithm.switches and KEYS[2]
local b, reason = load_bucket(key, before, spec, now)
if not b and not reset then
  return failed(reason) and reason or redis.error_reply('STATE 0 ' .. reason)
end

if reset then
  b = b or {gen = 0, settled = 0}
  redis.call('DEL', unpack(KEYS))
  b = {absent = true, key = key, hash = {}, spec = spec, gen = max(now, b.gen + 1), seq = 0, settled = b.settled,
    reset = now}
  b.state = algorithm.full(spec, now)
else
  local s = algorithm.at(switch_to(b.state, b.spec, spec, now), spec, now)
  local index = algorithm.window(s)
  local rest = amount - (s.amount or amount)
  s = algorithm.settle(s, spec, -amount, index)
  if algorithm.name == 'sliding_window' and rest > 0 then
    s = algorithm.settle(s, spec, -rest, index - 1)
  end
  b.state = s
end
local refusal = save_bucket(b, key, spec, now)
if refusal then
  return refusal
end
return {(algorithm.balance(b.state, spec, now)), b.gen, b.seq}

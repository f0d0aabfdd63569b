-- begin: gives a shard without an epoch one, and places its cursor, in a shard of another stream too; and in
-- one of this stream whose cursor is at from.
--
-- KEYS     the shard's meta
-- ARGV     stream, cursor, format version, from ('' for none)
-- Returns  epoch, stream, cursor in force
-- Errors   FORMAT <version>: the shard was written in another format; nothing was changed
-- Go twin  memstore.Store.Begin, Rebase
--
-- A stream that was made anew counts from 1 again. base is what its predecessors counted up to, so
-- that base + sequence never falls and a bucket's settled stays comparable. Counters of boots stay:
-- an edge may publish a batch to both streams.
local m = redis.call('HMGET', KEYS[1], 'epoch', 'stream', 'cursor', 'format', 'base')
if m[1] then
  if m[4] ~= ARGV[3] then
    return redis.error_reply('FORMAT ' .. tostring(m[4]))
  end
  if m[2] == ARGV[1] and m[3] ~= ARGV[4] then
    return {m[1], m[2], m[3]}
  end
end
local epoch = m[1] or string.format('%.0f', clock())
local base = tonumber(m[5] or '0') + tonumber(m[3] or '0')
redis.call('HSET', KEYS[1], 'epoch', epoch, 'stream', ARGV[1], 'cursor', ARGV[2], 'format', ARGV[3], 'base', base)
return {epoch, ARGV[1], ARGV[2]}

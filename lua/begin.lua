-- begin: gives a shard without an epoch one, and places its cursor.
--
-- KEYS     the shard's meta
-- ARGV     stream, cursor, format version
-- Returns  epoch, stream, cursor in force
-- Errors   FORMAT <version>: the shard was written in another format; nothing was changed
-- Go twin  memstore.Store.Begin
local m = redis.call('HMGET', KEYS[1], 'epoch', 'stream', 'cursor', 'format')
if m[1] then
  if m[4] ~= ARGV[3] then
    return redis.error_reply('FORMAT ' .. tostring(m[4]))
  end
  return {m[1], m[2], m[3]}
end
local epoch = int(clock())
redis.call('HSET', KEYS[1], 'epoch', epoch, 'stream', ARGV[1], 'cursor', ARGV[2], 'format', ARGV[3])
return {epoch, ARGV[1], ARGV[2]}

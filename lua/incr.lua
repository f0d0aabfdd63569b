-- incr: adds to a fixed window's counter, which never falls below zero and never lacks a time to live.
--
-- KEYS     the counter
-- ARGV     what to add (may be negative), the window's length in seconds
-- Returns  the counter's new value
-- Errors   ERR value is not an integer or out of range: the counter was left as it was
-- Go twin  none: a Redis integer is exact by itself
local value = redis.call('INCRBY', KEYS[1], ARGV[1])
if value < 0 then
  value = 0
  redis.call('SET', KEYS[1], 0, 'KEEPTTL')
end
if redis.call('TTL', KEYS[1]) < 0 then
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
return value

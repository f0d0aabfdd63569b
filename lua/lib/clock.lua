-- clock: the store's time in Unix microseconds. Redis' own, so that callers' clocks don't count.
local function clock()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end

-- arith: exact integers in doubles. Every value stays below 2^53, where doubles hold integers
-- exactly and floor(a / b) is exact too. Go twin: pkg/bucket/arith.go.
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max

local ONE = 1000000 -- a token in micro-tokens
local SECOND = 1000000 -- a second in microseconds
local DAY = 86400 * SECOND
local MAX_WAIT = 100 * 31557600 * SECOND
local NEVER = -1
local EXACT = 9007199254740992 -- 2^53
local LATEST = EXACT - 366 * DAY -- of times that are kept: the end of the window after it is exact too

-- muldiv(a, b, c): floor(a * b / c) and the remainder, for a, b >= 0, 0 < c < 2^53 / 7 and a
-- quotient below 2^53. Where the product would not be exact, b is taken digit by digit, from the top.
local function muldiv(a, b, c)
  local whole = floor(a / c)
  local r = a - whole * c
  local product = r * b
  if product < EXACT then
    local q = floor(product / c)
    return whole * b + q, product - q * c
  end
  local base = c < 1099511627776 and 4096 or 4 -- 2^40: (2 * base - 1) * c stays exact
  local place = 1
  while place * base <= b do
    place = place * base
  end
  local q, rem = 0, 0
  while place >= 1 do
    local t = rem * base + r * (floor(b / place) % base)
    local step = floor(t / c)
    q, rem = q * base + step, t - step * c
    place = place / base
  end
  return whole * b + q, rem
end

-- ceildiv(a, b, c): ceil(a * b / c), under muldiv's conditions.
local function ceildiv(a, b, c)
  local q, rem = muldiv(a, b, c)
  if rem > 0 then
    q = q + 1
  end
  return q
end

-- time_for(amount, rate): microseconds until amount has accrued, rounded up, at most MAX_WAIT.
local function time_for(amount, rate)
  if amount <= 0 then
    return 0
  end
  if floor(amount / rate) >= MAX_WAIT / SECOND then
    return MAX_WAIT
  end
  return ceildiv(amount, SECOND, rate)
end

local function floor_to(a, unit)
  return a - a % unit
end

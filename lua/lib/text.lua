-- text: numbers to and from what is stored and answered. Numbers that go into a command or a reply
-- are integers below 2^53: Redis writes those out exactly. (It cuts a fraction off a reply,
-- and Lua's own tostring keeps 14 digits; so text is made here.)

-- int_text(x): an integer below 2^53 in full.
local function int_text(x)
  return string.format('%.0f', x)
end

-- tokens_text(x): micro-tokens as a decimal number of tokens with six places.
local function tokens_text(x)
  local sign = ''
  if x < 0 then
    sign, x = '-', -x
  end
  local whole = floor(x / ONE)
  return string.format('%s%.0f.%06.0f', sign, whole, x - whole * ONE)
end

-- parse_tokens(text): micro-tokens, or nil. Any finite number is read, as other programs may
-- have written "1e+15"; what no bucket can hold is cut to the bounds.
local function parse_tokens(text)
  local x = text and tonumber(text)
  if not x or x ~= x or x == math.huge or x == -math.huge then
    return nil
  end
  -- The nearest micro-token, in parts: x * ONE may lie beyond what is exact.
  x = max(-1000000000, min(x, 100000000))
  local whole = floor(x)
  return whole * ONE + floor((x - whole) * ONE + 0.5)
end

-- parse_int(text, default): an integer of magnitude below 2^53, or nil; default where text is absent.
local function parse_int(text, default)
  if not text then
    return default
  end
  local x = tonumber(text)
  if x and x % 1 == 0 and x < EXACT and x > -EXACT then
    return x
  end
end

-- failed(reply): whether reply is an error that Redis answered to redis.pcall.
local function failed(reply)
  return type(reply) == 'table' and reply.err ~= nil
end

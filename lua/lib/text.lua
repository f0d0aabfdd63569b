-- text: numbers to and from what is stored and answered. tostring would keep 14 digits, and a
-- Lua number in a reply loses its fraction; so everything is a string made here.

-- int(x): an integer as text; + 0 turns -0 into 0.
local function int(x)
  return string.format('%.0f', x + 0)
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
  local sign, whole, micro = string.match(text, '^(%-?)(%d+)%.(%d%d%d%d%d%d)$')
  local x
  if whole then
    x = tonumber(whole) * ONE + tonumber(micro)
    if sign == '-' then
      x = -x
    end
  else
    x = tonumber(text)
    if not x or x ~= x or x == math.huge or x == -math.huge or not string.find(text, '^[%d.eE+-]+$') then
      return nil
    end
    x = floor(x * ONE)
  end
  return max(-1000000000000000, min(x, 100000000000000))
end

-- parse_int(text, default): an integer of magnitude below 2^53, or nil; default where text is absent.
local function parse_int(text, default)
  if not text then
    return default
  end
  if not string.find(text, '^%-?%d+$') then
    return nil
  end
  local x = tonumber(text)
  if x >= EXACT or x <= -EXACT then
    return nil
  end
  return x
end

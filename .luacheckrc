-- Redis runs Lua 5.1 and gives scripts these globals.
std = "lua51"
read_globals = { "redis", "cjson", "cmsgpack", "struct", "bit", "KEYS", "ARGV" }
-- A script carries the whole library and need not use all of it; the kinds of bucket share their functions' signatures.
ignore = { "211", "212" }
max_line_length = 130

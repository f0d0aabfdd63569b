// Package bucket is the arithmetic of rate limiting, and nothing else: token
// bucket with grace and debt, sliding window counter and daily quota, as pure
// functions over integers. It imports the standard library only, and no time,
// context, net or logging: callers pass now.
//
// Every function here is the Go twin of a Lua function in lua/lib; the two are
// held together by the tests of package store.
//
// # Units
//
// Amounts are micro-tokens (1 token = One), times are Unix microseconds, rates
// are micro-tokens per second, multipliers are millionths. A redis.call in Lua
// computes with doubles, so every value that both twins touch stays below 2^53:
// MaxTokens and MaxRate bound what configuration may ask for.
package bucket

// Package ratelimiter counts in fixed windows, for limits that are enforced by counting first:
// Incr, compare with the limit, Incr back if it is above. Every caller gets another result of
// Incr, so the sum that was let through is exact. What fails afterwards is given back to the
// window that was charged: see Counter.At, and the example.
//
// Counters are strings under {name}:{key}:{bin}, the bin being the number of the window modulo
// 64; each lives for one window from when it is made. No counter falls below zero. Windows follow
// the caller's clock: two callers whose clocks differ count in two windows for as long as they
// differ. The counters are outside the event log, so a Redis that loses its data loses up to
// one window of them.
//
// NewRedis is for many processes that share limits, NewMemory for one, NewNoop for none.
package ratelimiter

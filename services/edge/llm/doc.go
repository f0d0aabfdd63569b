// Package llm holds calls of LLM APIs to their quotas: requests and tokens per minute of a user,
// requests per second of a model.
//
// Tokens are known only once the upstream has counted them. So a call reserves an estimate
// (Inspect, Call.Reserve), and its answer settles it (Meter, Grant.Settle). Both read what passes
// within a bound and keep nothing of it; neither delays an answer.
//
// The counters are fixed windows of package ratelimiter: every call is counted first, then compared, and
// taken back where it is above a limit. They are each caller's clock's, and outside of the event
// log. What a call used beyond its reserve may take a counter above its limit; that debt is carried
// into the windows that follow, so that it blocks until it is repaid. docs/adr has why.
//
// The package knows bodies as bytes and nothing of HTTP; the proxy is its caller.
package llm

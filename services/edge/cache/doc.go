// Package cache keeps answers of upstreams for the yellow tier, by the rules that
// RFC 9111 has for a shared cache, within a bound in bytes.
//
// It is stricter than the RFC asks in four things. An answer is given to requests with the
// same credentials only, so that no client sees what was meant for another. Answers that
// set cookies are not stored. Directives that can't be read forbid everything. And what an
// upstream wants to see validated first (no-cache) is not stored at all, since a yellow
// request reaches no upstream.
//
// It is looser in one, by configuration: a stale answer may be given out for so long as the
// route's max_stale_seconds allow, unless the upstream forbids that (must-revalidate,
// proxy-revalidate, s-maxage) or bounds it (stale-if-error), or the client does.
//
// Each edge has a cache of its own: what an unsafe request invalidates (RFC 9111, 4.4) is
// forgotten by the edge that it went through.
package cache

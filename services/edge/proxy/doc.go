// Package proxy is the HTTP face of admission: it turns HTTP requests into
// admission requests, refusals into answers, and forwards the rest to their
// upstream, streaming in both directions.
//
// # What crosses
//
// The names in headers.go belong to the edge: a client's and an upstream's own
// copies are removed, in heads, informational answers and trailers alike. An
// upstream sees the API key in Authorization, which may be its own credential too,
// but not a verified key in X-API-Key, which was meant for the edge.
// X-Forwarded-*, Forwarded and X-Real-IP of a peer that is no trusted proxy are replaced
// or removed.
// The path is forwarded as it came; it was matched in its clean, decoded form.
//
// # What is counted
//
// Every forwarded request is finished in admission exactly once: when its last byte
// has been passed on, when it failed, when its client went away, or when an
// upgraded connection was closed.
//
// A preflight of a route with CORS is answered here and is no request: it is charged to
// nobody and finished nowhere.
//
// Requests that could be framed in two ways never come here: package framing, below net/http, refuses
// them. What comes is re-framed, so that an upstream never sees the client's framing.
package proxy

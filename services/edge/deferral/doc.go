// Package deferral keeps the word that a 202 gives: a request is stored, runs later, and its answer waits for its owner.
//
// A request is a message of AEGIS_DEFERRED, a work queue that all edges share; what has become of it is the last
// message of its own subject in AEGIS_DEFERRALS, which only ever changes by compare-and-set. Both last an
// hour. Add returns only when both are stored. The streams bound what waits, in total and per client.
//
// # How often it runs
//
// At least once: an edge marks a request running before it runs it, and when that edge dies another runs it
// again, thirty seconds after the last sign of life. At most once with an Idempotency-Key: found running, it
// fails ("it may have run"), and the same key again within the hour is answered by the first request's place.
//
// # In what order
//
// Roughly that of arrival, per client: an edge lets no request of a client run before an older one that it knows
// to wait, and spaces the rest by what the limits give. Several edges know of different ones.
//
// # Who may read it
//
// Requests hold the credentials of their clients. The NATS permissions let edges alone read the two streams, and
// with Config.Secret requests and answers are encrypted (AES-256-GCM), each bound to its id.
package deferral

// Package edge is the stateless gateway replica. It admits requests by the
// limits of the policy (package admission), proxies them to their upstream
// (package proxy), and reports what became of each as an event.
//
// An edge keeps serving when anything else is away: without NATS by the last
// policy and with its events queued, without Redis by its share of each limit in
// memory. Its caller builds the bus and the store, and closes both after Run.
package edge

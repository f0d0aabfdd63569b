// Package admission decides requests. It knows who calls (Identifier), which
// limits apply (policy.Table), whether the shared store can be asked (Breaker),
// what share of a limit is this edge's when it can't (Fleet), how healthy an
// upstream is (Multipliers), and what need not be asked again (Memory: leases and
// denials). It takes a small view of a request and returns a Decision, and it takes
// the facts of a response and makes the event of them.
//
// It knows no net/http: the proxy is one face of it. A face must call Decide once
// for a request and, exactly once for each one that it forwarded, Finish. Nothing
// here waits for the network but Store.Check, whose implementations bound it.
package admission

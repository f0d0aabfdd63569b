// Package controlplane takes changes of the policy and tells the state of the system.
//
// Every change goes one way, whoever sends it: it is authenticated, sanitised
// against the version in force, and appended to AEGIS_CONFIG on the condition
// that nobody else appended meanwhile. So versions have one order, concurrent
// writers never overwrite each other unseen, and any number of replicas may
// run; what each holds in memory is only what it read from that stream.
//
// The caller owns the bus. Run needs no NATS to begin with: it waits for it,
// answers reads from the last known version, and refuses changes until then.
package controlplane

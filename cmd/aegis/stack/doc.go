// Package stack runs the whole of AegisRate in one process: the four services, a
// NATS server, a Redis and the sample upstream. It serves `aegis up` and the test
// of the whole loop.
//
// Nothing in it is mocked: the services talk over a real NATS server (JetStream on
// disk, connected in process) and a real Redis (a private redis-server where one is
// on PATH, else an embedded one). Start brings them up in the order of their needs
// and Stop takes them down in the opposite one, senders before receivers, so that
// every event is published, settled and folded before its reader goes.
package stack

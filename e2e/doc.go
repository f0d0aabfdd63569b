// Package e2e tests the compose stack from outside: three edges behind the
// front, real Redis and NATS, the stock nats CLI. `make e2e` prepares what the
// tests need and runs them; they fail, and never skip, where it is missing.
//
// The tests share one stack and run one after another. Each sets the quotas
// that it needs and uses clients of its own, since buckets outlive a test.
package e2e

// Package stack runs deploy/compose.yaml for tests: a project of its own with
// free ports, driven by the same commands that a user types, and torn down at
// the end whatever happened. Containers beside the stack (clients, helpers)
// run through testcontainers.
//
// It needs Docker, and the images that scripts/e2e.sh makes. The test process
// reaches containers by their addresses, as one can on Linux.
package stack

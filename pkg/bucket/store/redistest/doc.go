// Package redistest gives a test a Redis of its own. It looks in this order, and fails the
// test where all are missing: the server at AEGIS_TEST_REDIS_URL (shared, so the test gets it
// emptied, and can't stop it), redis-server on PATH (private, on a free port), a container
// through the docker command.
package redistest

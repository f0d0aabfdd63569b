// Package memstore keeps buckets in this process: for tests, for one edge alone, and as the
// twin that the Redis scripts are compared with. It owns no goroutine.
package memstore

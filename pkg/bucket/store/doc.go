// Package store owns where buckets live: the Store interface, and what its two
// implementations (memstore, redisstore) must agree on. The conformance suite is
// storetest; redistest gives tests a real Redis.
package store

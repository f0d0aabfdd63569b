// Package redisstore keeps buckets in Redis: one server, a master behind Sentinel, or Redis
// Cluster. It owns the keys (keys.go), the scripts' arguments and answers (codec.go), and how
// a call fails (runner.go): a Check is sent once and never repeated by itself, a Settle may be.
//
// The arithmetic is in the scripts of package lua.
package redisstore

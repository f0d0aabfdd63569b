package store

import "hash/fnv"

// ShardOf is the shard of a client: 32-bit FNV-1a of the id, modulo Shards.
func ShardOf(client string) int {
	h := fnv.New32a()
	h.Write([]byte(client)) // a hash's Write never fails
	return int(h.Sum32() % Shards)
}

// Package settler makes every bucket pay what its requests really cost.
//
// It reads the facts of finished requests (AEGIS_RESPONSES) in order and without
// acknowledgements, folds each message into one delta per bucket (cost.go) and
// applies it to the store. How far the stream has been applied is kept in the
// store itself, per shard, and moves in the same atomic call as the balances:
// whatever happens to a settler, a bucket is debited once, and whatever happens
// to the store, its cursor tells what it still has to be told. So any number of
// settlers may run at once; each applies everything, and all but the first call
// for a message change nothing.
//
// Two readers share the shards (consume.go). The main one follows the end of the
// stream for every shard that is up to date. A shard that is not — its store
// does not answer, has gone back in time, has lost its state, or the settler has
// just started — is parked, and the catch-up reader brings it from its own cursor
// to where the main one stands (catchup.go). So one dead Redis master holds no
// other shard back, and what waits for it is the stream itself, not memory.
//
// A caller passes a bus, a store and a registry, calls Run, and ends it by
// cancelling its context; a message being applied is then finished first. The
// streams must have been provisioned by someone; until then Run waits.
//
// What the settler promises:
//
//   - A message that can't be read, or an item that can't be applied, is
//     published to the dead-letter subject before any cursor passes it.
//   - A shard without an epoch (a first start, or lost state) begins at the end
//     of the stream: what was published before can't be told from what the lost
//     state held already. Rebuilding from the ledger is a later issue.
//   - A shard that belongs to another incarnation of the stream begins at the
//     start of this one: nothing in it has been settled in any lineage. Batches
//     that an edge publishes to both are told apart by the boot counters, which stay.
//   - A boot's counter is dropped only when the boot's last message left the stream
//     Config.CounterRetention ago. An edge that publishes a batch again after
//     longer than that is settled twice.
//   - Messages that every shard has settled are purged, but for a margin that a
//     stale replica may be behind, and an hour for those who read the stream for
//     other reasons (see Service.purgeBelow).
package settler

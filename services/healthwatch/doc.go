// Package healthwatch turns what upstreams did into what their routes may take.
//
// It folds the responses of all edges into a rolling window per upstream
// (window.go), moves the upstream's multiplier M one step per interval
// (multiplier.go, pure), and publishes it as a tick on aegis.health.<upstream>.
//
// There is no leader. Every replica folds the same events. An interval after it
// saw the last tick, by its own monotonic clock, it computes the next one from
// that and publishes it on condition that no other came in between; the first
// wins, the others adopt what it published (fold.go, healthwatch.go). It follows
// that M takes at most one step per interval whatever the number of replicas,
// that a replica which was stopped can neither take M back nor step it twice,
// and that M moves without traffic too, so that a silent upstream recovers.
//
// No wall clock matters (it only says where reading begins): samples age by the
// clock of the NATS server, which stamps every message (clock.go). Samples carry the store's clock; one that is
// wrong by more than the window's age makes all of its samples too old, and then
// M recovers.
//
// After a restart the last tick is adopted as it stands, even one that is older than the
// 15 seconds after which edges ignore it: if the upstream is still ill, M goes on
// from where it was; if not, it rises from there at the usual pace.
//
// A caller passes a bus and a registry, calls Run, and ends it by cancelling its context.
package healthwatch

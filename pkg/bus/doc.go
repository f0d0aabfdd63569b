// Package bus owns the connection to NATS: the streams' provisioning, ordered
// publishing and reading, core messages and micro services. Nothing outside it
// and its subpackages imports nats.go or nats-server.
//
// A Bus mends itself: Connect returns whether or not a server is there, and
// every operation either waits for the network within a bound (Publish, Stream,
// Last, Purge, Provision), waits the outage out (Follow, Work, Outbox), or never
// touches it (Send, Outbox.Add). Errors say which state they leave behind; see
// ErrUnavailable and its siblings.
//
// A caller stops what publishes first, then its Outbox (Close), then the Bus.
//
// # Permissions
//
// What the NATS user of a service must be allowed, per operation. <s> is a
// stream, "pub" and "sub" are the user's publish and subscribe permissions.
//
//	every operation       sub _INBOX_<Config.Name>.>
//	Publish, Outbox       pub the subject
//	Send                  pub the subject
//	Call                  pub the subject
//	Subscribe             sub the subject
//	Follow(s)             pub $JS.API.CONSUMER.CREATE.<s>.>
//	                      pub $JS.API.CONSUMER.MSG.NEXT.<s>.*
//	                      pub $JS.API.CONSUMER.DELETE.<s>.*
//	                      pub $JS.API.STREAM.INFO.<s>
//	Stream(s)             pub $JS.API.STREAM.INFO.<s>
//	Last(s), At(s)        pub $JS.API.STREAM.INFO.<s>
//	                      pub $JS.API.STREAM.MSG.GET.<s>
//	Get(s, subject)       pub $JS.API.DIRECT.GET.<s>.<subject>
//	Work(s, consumer)     pub $JS.API.CONSUMER.CREATE.<s>.<consumer>
//	                      pub $JS.API.CONSUMER.MSG.NEXT.<s>.<consumer>
//	                      pub $JS.ACK.<s>.<consumer>.>
//	Purge(s)              pub $JS.API.STREAM.INFO.<s>
//	                      pub $JS.API.STREAM.PURGE.<s>
//	Provision(s)          pub $JS.API.STREAM.CREATE.<s>
//	                      pub $JS.API.STREAM.UPDATE.<s>
//	Serve(name, subject)  sub the subject
//	                      sub $SRV.PING, $SRV.PING.<name>, $SRV.PING.<name>.*
//	                      sub $SRV.INFO, $SRV.INFO.<name>, $SRV.INFO.<name>.*
//	                      sub $SRV.STATS, $SRV.STATS.<name>, $SRV.STATS.<name>.*
//	                      allow_responses (or pub to the callers' inboxes)
//
// A publish that is denied fails with ErrDenied at once. A denied subscription
// is logged at error level and counted in Stats.
package bus

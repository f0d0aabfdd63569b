package events

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
)

// Subjects that services publish to and subscribe on. No subject is written
// anywhere else. Tokens built from names (an upstream, an edge) are safe as
// they are: policy and configuration restrict names to [a-z0-9_-].
const (
	// SubjectConfigCommand takes a change request (a micro service; see ConfigCommand).
	SubjectConfigCommand = "aegis.config.command"
	// SubjectControl takes every request of the admin API (a micro service): the method and the path
	// are in the headers HeaderMethod and HeaderPath, the answer's status in Nats-Service-Error-Code.
	SubjectControl = "aegis.control"
	// SubjectConfigUpdates carries every accepted config version (see ConfigVersion).
	SubjectConfigUpdates = "aegis.config.updates"
	// SubjectAudit carries admin operations and failed authentications (see Audit).
	SubjectAudit = "aegis.audit"

	// SubjectRetry is where an operator publishes what dead letters left out (see DeadLetter.Retry).
	SubjectRetry = subjectResponse + "retry"

	// subjectRules are the keys of the KV bucket AEGIS_RULES, as NATS names them.
	subjectRules = "$KV.AEGIS_RULES."

	subjectResponse   = "aegis.response."
	subjectHealth     = "aegis.health."
	subjectHeartbeat  = "aegis.edge.heartbeat."
	subjectDeadLetter = "aegis.deadletter."
	subjectChanged    = "aegis.bucket.changed."
	subjectEcho       = subjectChanged + "echo-"
	subjectDeferred   = "aegis.deferred."
	subjectDeferral   = "aegis.deferral."
)

// Wildcards over the subjects that carry a name.
const (
	AllResponses   = subjectResponse + "*"
	AllHealth      = subjectHealth + "*"
	AllHeartbeats  = subjectHeartbeat + "*"
	AllDeadLetters = subjectDeadLetter + "*"
	AllChanged     = subjectChanged + "*"
	AllDeferred    = subjectDeferred + "*"
	AllDeferrals   = subjectDeferral + "*"
)

// SubjectResponse is where the edge incarnation named boot publishes its ResponseBatches.
func SubjectResponse(boot string) string { return subjectResponse + boot }

// SubjectHealth is where the ticks of one upstream are published (see Health).
func SubjectHealth(upstream string) string { return subjectHealth + upstream }

// SubjectHeartbeat is where an edge says every second that it is alive (see Heartbeat).
func SubjectHeartbeat(edge string) string { return subjectHeartbeat + edge }

// SubjectDeadLetter is where a service puts what it could not parse or apply (see DeadLetter).
func SubjectDeadLetter(service string) string { return subjectDeadLetter + service }

// SubjectDeferred is where the Deferred requests of a client wait. A client id is no token: its digest is.
func SubjectDeferred(client string) string {
	digest := sha256.Sum256([]byte(client))
	return subjectDeferred + hex.EncodeToString(digest[:16])
}

// SubjectDeferral is where the Deferral of that id stands. Its id is letters and digits.
func SubjectDeferral(id string) string { return subjectDeferral + id }

// SubjectRules is where the KV bucket of the rules keeps key (see package rules).
func SubjectRules(key string) string { return subjectRules + key }

// RulesKey is the key that a subject of the rules names.
func RulesKey(subject string) string { return strings.TrimPrefix(subject, subjectRules) }

// Headers of a request on SubjectControl.
const (
	HeaderMethod = "Aegis-Method"
	HeaderPath   = "Aegis-Path"
)

// SubjectChanged is where the settler, the controlplane and edges tell edges which buckets of a shard
// are not what they were (see BucketsChanged). Nothing keeps it: what is remembered is short-lived.
func SubjectChanged(shard int) string { return subjectChanged + strconv.Itoa(shard) }

// SubjectEcho is where an edge incarnation tells itself something, the way that changed buckets come
// (AllChanged): while it comes back, they do.
func SubjectEcho(boot string) string { return subjectEcho + boot }

// IsEcho reports whether a subject of AllChanged is some edge's echo.
func IsEcho(subject string) bool { return strings.HasPrefix(subject, subjectEcho) }

// UpstreamOf is the upstream that a health subject names.
func UpstreamOf(subject string) string { return strings.TrimPrefix(subject, subjectHealth) }

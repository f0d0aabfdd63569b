package events

import "strings"

// Subjects that services publish to and subscribe on. No subject is written
// anywhere else. Tokens built from names (an upstream, an edge) are safe as
// they are: policy and configuration restrict names to [a-z0-9_-].
const (
	// SubjectConfigCommand takes a change request (a micro service; see ConfigCommand).
	SubjectConfigCommand = "aegis.config.command"
	// SubjectConfigUpdates carries every accepted config version (see ConfigVersion).
	SubjectConfigUpdates = "aegis.config.updates"
	// SubjectAudit carries admin operations and failed authentications (see Audit).
	SubjectAudit = "aegis.audit"

	subjectResponse   = "aegis.response."
	subjectHealth     = "aegis.health."
	subjectHeartbeat  = "aegis.edge.heartbeat."
	subjectDeadLetter = "aegis.deadletter."
)

// Wildcards over the subjects that carry a name.
const (
	AllResponses   = subjectResponse + "*"
	AllHealth      = subjectHealth + "*"
	AllHeartbeats  = subjectHeartbeat + "*"
	AllDeadLetters = subjectDeadLetter + "*"
)

// SubjectResponse is where the edge incarnation named boot publishes its ResponseBatches.
func SubjectResponse(boot string) string { return subjectResponse + boot }

// SubjectHealth is where the ticks of one upstream are published (see Health).
func SubjectHealth(upstream string) string { return subjectHealth + upstream }

// SubjectHeartbeat is where an edge says every second that it is alive (see Heartbeat).
func SubjectHeartbeat(edge string) string { return subjectHeartbeat + edge }

// SubjectDeadLetter is where a service puts what it could not parse or apply (see DeadLetter).
func SubjectDeadLetter(service string) string { return subjectDeadLetter + service }

// UpstreamOf is the upstream that a health subject names.
func UpstreamOf(subject string) string { return strings.TrimPrefix(subject, subjectHealth) }

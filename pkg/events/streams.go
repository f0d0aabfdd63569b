package events

import "time"

// Names of the JetStream streams.
const (
	StreamResponses  = "AEGIS_RESPONSES"
	StreamHealth     = "AEGIS_HEALTH"
	StreamConfig     = "AEGIS_CONFIG"
	StreamAudit      = "AEGIS_AUDIT"
	StreamDeadLetter = "AEGIS_DEADLETTER"
	StreamDeferred   = "AEGIS_DEFERRED"
	StreamDeferrals  = "AEGIS_DEFERRALS"
	// StreamRules is the stream of the KV bucket AEGIS_RULES.
	StreamRules = "KV_AEGIS_RULES"
)

// Stream is what a stream must look like. Package bus provisions it.
type Stream struct {
	Name        string
	Description string
	Subjects    []string
	// MaxAge, MaxBytes, MaxPerSubject and MaxMessages bound the stream; zero is no bound.
	MaxAge        time.Duration
	MaxBytes      int64
	MaxPerSubject int64
	MaxMessages   int64
	// RefuseNew makes a full stream refuse new messages; otherwise the oldest go. RefuseNewPerSubject
	// does so for a full subject too.
	RefuseNew, RefuseNewPerSubject bool
	// WorkQueue removes a message when the consumer has done it.
	WorkQueue bool
	// MaxMessage bounds one message, in bytes; zero is the server's bound.
	MaxMessage int32
	// Dedup is the window in which a message id is remembered.
	Dedup time.Duration
	// KeyValue makes the stream a KV bucket, which its name must say ("KV_<bucket>").
	KeyValue bool
}

const (
	mib = 1 << 20
	gib = 1 << 30
	day = 24 * time.Hour
)

const (
	// DeferralLife is how long a deferred request may wait, and how long its result is kept.
	DeferralLife = time.Hour
	// MaxDeferred and MaxDeferredPerClient bound the requests that wait.
	MaxDeferred, MaxDeferredPerClient = 10_000, 100
)

// Streams lists every stream of the system.
func Streams() []Stream {
	return []Stream{
		{
			Name:        StreamResponses,
			Description: "Facts of finished requests, in batches; the settler purges what is settled",
			Subjects:    []string{AllResponses},
			MaxAge:      3 * day,
			MaxBytes:    gib,
			RefuseNew:   true,
			Dedup:       2 * time.Minute,
		},
		{
			Name:          StreamHealth,
			Description:   "Multiplier, p95 and error rate of each upstream, a message a tick",
			Subjects:      []string{AllHealth},
			MaxPerSubject: 64,
			MaxBytes:      64 * mib,
			Dedup:         2 * time.Minute,
		},
		{
			Name:        StreamConfig,
			Description: "Every accepted config version, whole",
			Subjects:    []string{SubjectConfigUpdates},
			RefuseNew:   true,
			MaxMessage:  mib + 64<<10, // a document of 1 MiB and its attribution
			Dedup:       2 * time.Minute,
		},
		{
			Name:        StreamAudit,
			Description: "Admin operations and failed authentications",
			Subjects:    []string{SubjectAudit},
			MaxAge:      90 * day,
			MaxBytes:    256 * mib,
			Dedup:       2 * time.Minute,
		},
		{
			Name:          StreamRules,
			Description:   "Users, API keys (their hashes) and plans, as edges look them up",
			Subjects:      []string{SubjectRules(">")},
			MaxPerSubject: 1,
			MaxBytes:      gib, // a million users and their keys take most of it
			RefuseNew:     true,
			MaxMessage:    256 << 10,
			Dedup:         2 * time.Minute,
			KeyValue:      true,
		},
		{
			Name:                StreamDeferred,
			Description:         "Requests answered 202 that run later, by client",
			Subjects:            []string{AllDeferred},
			WorkQueue:           true,
			RefuseNew:           true,
			RefuseNewPerSubject: true,
			MaxAge:              DeferralLife,
			MaxBytes:            256 * mib,
			MaxMessages:         MaxDeferred,
			MaxPerSubject:       MaxDeferredPerClient,
			Dedup:               2 * time.Minute,
		},
		{
			Name:          StreamDeferrals,
			Description:   "What has become of them, the last state of each",
			Subjects:      []string{AllDeferrals},
			RefuseNew:     true,
			MaxAge:        DeferralLife,
			MaxBytes:      512 * mib,
			MaxPerSubject: 1,
			Dedup:         2 * time.Minute,
		},
		{
			Name:        StreamDeadLetter,
			Description: "What a service could not parse or apply, with the reason",
			Subjects:    []string{AllDeadLetters},
			MaxAge:      30 * day,
			MaxBytes:    256 * mib,
			Dedup:       2 * time.Minute,
		},
	}
}

package events_test

import (
	"strings"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/events"
)

// TestEverySubjectHasItsStream shows that each stored subject is taken by the
// stream it is meant for, and by no other.
func TestEverySubjectHasItsStream(t *testing.T) {
	t.Parallel()
	for subject, want := range map[string]string{
		events.SubjectResponse("edge-1-abc"):      events.StreamResponses,
		events.SubjectHealth("sample"):            events.StreamHealth,
		events.SubjectConfigUpdates:               events.StreamConfig,
		events.SubjectAudit:                       events.StreamAudit,
		events.SubjectDeadLetter("settler"):       events.StreamDeadLetter,
		events.SubjectDeferred("user:ann"):        events.StreamDeferred,
		events.SubjectDeferral("4kq2"):            events.StreamDeferrals,
		events.SubjectHeartbeat("edge-1"):         "", // core
		events.SubjectConfigCommand:               "", // a service
		events.SubjectControl:                     "", // a service
		events.SubjectChanged(7):                  "", // core
		events.SubjectRules("user.ann"):           events.StreamRules,
		events.SubjectConfigCommand + ".anything": "",
	} {
		var got []string
		for _, s := range events.Streams() {
			for _, pattern := range s.Subjects {
				if matches(pattern, subject) {
					got = append(got, s.Name)
				}
			}
		}
		if strings.Join(got, ",") != want {
			t.Errorf("%s is taken by %q, want %q", subject, got, want)
		}
	}
}

// matches applies the wildcards of NATS subjects.
func matches(pattern, subject string) bool {
	p, s := strings.Split(pattern, "."), strings.Split(subject, ".")
	if last := len(p) - 1; p[last] == ">" && len(s) > last {
		p, s = p[:last], s[:last]
	}
	if len(p) != len(s) {
		return false
	}
	for i := range p {
		if p[i] != "*" && p[i] != s[i] {
			return false
		}
	}
	return true
}

func TestStreamsAreBounded(t *testing.T) {
	t.Parallel()
	for _, s := range events.Streams() {
		if s.Name != events.StreamConfig && s.MaxBytes == 0 {
			t.Errorf("%s has no bound on bytes: it would fill the disk", s.Name)
		}
		if s.MaxAge != 0 && s.Dedup > s.MaxAge {
			t.Errorf("%s remembers ids longer than messages; the server refuses that", s.Name)
		}
		if s.Description == "" || s.Dedup == 0 {
			t.Errorf("%s lacks a description or a dedup window", s.Name)
		}
	}
}

func TestUpstreamOf(t *testing.T) {
	t.Parallel()
	if got := events.UpstreamOf(events.SubjectHealth("llm-backend")); got != "llm-backend" {
		t.Errorf("got %q", got)
	}
}

package settler

import (
	"context"
	"fmt"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// maxDeadData bounds what a dead letter carries of its message, in bytes: base64
// and attribution included it stays below the server's bound on a message (1 MiB).
const maxDeadData = 512 << 10

// deadLetter publishes a message that can't be settled, or not into one bucket of it, and waits until that is
// stored: only then may a cursor pass it. Its message id makes the dead letters
// of several settlers one. The error is ctx's.
func (s reader) deadLetter(ctx context.Context, m bus.Message, of *events.DeadBucket, reason string) error {
	dead := events.DeadLetter{
		Stream: events.StreamResponses, Incarnation: s.stream, Seq: m.Seq, Subject: m.Subject, Reason: reason, Bucket: of, Data: m.Data,
	}
	if len(dead.Data) > maxDeadData {
		dead.Data = dead.Data[:maxDeadData]
		dead.Reason = fmt.Sprintf("%s (data cut from %d bytes)", reason, len(m.Data))
	}
	data, err := events.Encode(dead)
	if err != nil {
		return fmt.Errorf("settler: dead letter of %d: %w", m.Seq, err)
	}
	const first, most = 50 * time.Millisecond, 2 * time.Second
	for wait := first; ; wait = min(2*wait, most) {
		_, err := s.bus.Publish(ctx, events.SubjectDeadLetter("settler"), data, bus.WithMsgID(dead.ID()))
		if err == nil {
			s.metrics.deadLetters.Inc()
			s.log.Error().Uint64("seq", m.Seq).Str("subject", m.Subject).Str("reason", reason).Msg("set a message aside as a dead letter")
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.log.Error().Err(err).Uint64("seq", m.Seq).Str("reason", reason).Msg("cannot store a dead letter; settlement waits for it")
		pause(ctx, wait)
	}
}

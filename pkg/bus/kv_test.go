package bus_test

import (
	"errors"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
)

func TestGetReadsABucket(t *testing.T) {
	t.Parallel()
	s := bustest.Start(t)
	b := s.Bus(t)
	ctx := t.Context()
	subject := events.SubjectRules("user.ann")
	if _, err := b.Get(ctx, events.StreamRules, subject); !errors.Is(err, bus.ErrNoStream) {
		t.Errorf("before the bucket is there: %v", err)
	}
	if err := b.Provision(ctx, events.Streams()); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Get(ctx, events.StreamRules, subject); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("a key that never was: %v", err)
	}
	seq, err := b.Publish(ctx, subject, []byte("1"), bus.WithLastSubjectSeq(0))
	if err != nil {
		t.Fatal(err)
	}
	if m, err := b.Get(ctx, events.StreamRules, subject); err != nil || string(m.Data) != "1" || m.Seq != seq || m.Time.IsZero() {
		t.Errorf("%+v, %v", m, err)
	}
	if _, err := b.Publish(ctx, subject, nil, bus.WithDelete(), bus.WithLastSubjectSeq(0)); !errors.Is(err, bus.ErrConflict) {
		t.Errorf("a delete that expects another state: %v", err)
	}
	if _, err := b.Publish(ctx, subject, nil, bus.WithDelete(), bus.WithLastSubjectSeq(seq)); err != nil {
		t.Fatal(err)
	}
	if m, err := b.Get(ctx, events.StreamRules, subject); err != nil || len(m.Data) != 0 || m.Seq != seq+1 {
		t.Errorf("a key that was deleted: %+v, %v", m, err)
	}
	s.Stop()
	if _, err := b.Get(ctx, events.StreamRules, subject); !errors.Is(err, bus.ErrUnavailable) {
		t.Errorf("without a server: %v", err)
	}
}

package main

import (
	"strings"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// What a letter says can be read and be settled once its reason is gone: one bucket of it where only that
// was left out, and nothing where its message still can't be read.
func TestDeadLetterCommands(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Provisioned(t)
	spec := bucket.Spec{Kind: bucket.TokenBucket, Capacity: 10 * bucket.One, Rate: bucket.One, SlowestRate: bucket.One, MaxDebt: bucket.One}
	charged := func(client string, scopes ...string) events.Response {
		e := events.Response{ID: "x", Client: client, Time: 1, Outcome: events.OutcomeOK}
		for _, scope := range scopes {
			e.Charges = append(e.Charges, events.Charge{Scope: scope, How: events.HowRedis})
		}
		return e
	}
	batch, err := events.Encode(events.ResponseBatch{
		Boot: "b", N: 7, Specs: []bucket.Spec{spec},
		Events: []events.Response{charged("ann", "r", "s"), charged("bob", "r"), charged("ann", "s")},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []events.DeadLetter{
		{Stream: events.StreamResponses, Seq: 3, Subject: "aegis.response.b", Reason: "malformed\nhere", Data: []byte("{")},
		{Stream: events.StreamResponses, Seq: 4, Subject: "aegis.response.b", Reason: "tokens: garbage", Data: batch,
			Bucket: &events.DeadBucket{Client: "ann", Scope: "r", Kind: bucket.TokenBucket}},
	} {
		data, err := events.Encode(d)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Publish(t.Context(), events.SubjectDeadLetter("settler"), data); err != nil {
			t.Fatal(err)
		}
	}

	var out strings.Builder
	if err := listDeadLetters(t.Context(), b, &out); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 3 || !strings.Contains(lines[1], "malformed here") || !strings.Contains(lines[2], "tokens: garbage") {
		t.Errorf("list:\n%s", out.String())
	}
	out.Reset()
	if err := showDeadLetter(t.Context(), b, &out, 2); err != nil || !strings.Contains(out.String(), `"client": "bob"`) {
		t.Errorf("show: %v\n%s", err, out.String())
	}
	if err := showDeadLetter(t.Context(), b, &out, 3); err == nil {
		t.Error("showed a letter that is not there")
	}

	if err := retryDeadLetters(t.Context(), b, &out, []uint64{1, 2, 2}); err == nil || !strings.Contains(err.Error(), "dead letter 1: it can't be settled yet") {
		t.Errorf("retry: %v", err)
	}
	state, err := b.Stream(t.Context(), events.StreamResponses)
	if err != nil || state.Msgs != 1 {
		t.Fatalf("%d messages, %v; want one, however often a letter is retried", state.Msgs, err)
	}
	m, err := b.Last(t.Context(), events.StreamResponses, events.SubjectRetry)
	if err != nil {
		t.Fatal(err)
	}
	got, err := events.Decode[events.ResponseBatch](m.Data)
	if err != nil || got.N != 1 || !strings.HasPrefix(got.Boot, "retry-") ||
		len(got.Events) != 1 || got.Events[0].Client != "ann" || len(got.Events[0].Charges) != 1 || got.Events[0].Charges[0].Scope != "r" {
		t.Errorf("retried %+v, %v", got, err)
	}
}

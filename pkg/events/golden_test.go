package events_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/events"
)

var noon = time.Date(2025, 11, 30, 0, 0, 0, 0, time.UTC)

// Values of which testdata has the wire form. The files are written by hand:
// what is on the wire today must be read for as long as a stream may hold it.
var (
	response = events.ResponseBatch{
		Boot: "edge-7f3a-1764460800000000",
		Edge: "edge-1",
		N:    42,
		Specs: []bucket.Spec{
			{Kind: bucket.TokenBucket, Capacity: 20 * bucket.One, Rate: 10 * bucket.One, SlowestRate: 2 * bucket.One, Grace: 4 * bucket.One, MaxDebt: 200 * bucket.One},
			{Kind: bucket.SlidingWindow, Capacity: 100 * bucket.One, Window: 60},
			{Kind: bucket.DailyQuota, Capacity: 10_000 * bucket.One, MaxDebt: 100_000 * bucket.One},
		},
		Events: []events.Response{
			{
				ID: "01JDX0M4", Time: 1764460800123456, Client: "u:alice", Route: "cost", Upstream: "sample", Config: 7,
				Base: bucket.One,
				Charges: []events.Charge{
					{Scope: "cost", Spec: 0, Amount: bucket.One, How: events.HowRedis},
					{Scope: "search", Spec: 1, Amount: bucket.One, Window: 29407680, How: events.HowUnknown},
					{Scope: bucket.ScopeDay, Spec: 2, Amount: bucket.One, Window: 20421, How: events.HowLocal},
				},
				ComputeCost: "10", LatencyRate: 2 * bucket.One, MaxCost: 1000 * bucket.One,
				Status: 200, Latency: 12345, Duration: 23456, Outcome: events.OutcomeOK,
			},
			{
				ID: "01JDX0M5", Time: 1764460800123999, Client: "ip:192.0.2.1", Route: "fail", Upstream: "sample", Config: 7,
				Outcome: events.OutcomeUnreached, Refund: true,
			},
		},
	}
	health = events.Health{
		Upstream: "sample", Tick: 9, Multiplier: 500_000, P95: 912_000, ErrorRate: 166_667, Samples: 30, By: "healthwatch-1",
	}
	heartbeat = events.Heartbeat{
		Edge: "edge-1", Boot: "edge-7f3a-1764460800000000", Config: 7, Degraded: true,
		Green: 100, Yellow: 20, Red: 3, Queued: 5, Lost: 1, Leaving: true,
	}
	config = events.ConfigVersion{
		Version: 7, By: "127.0.0.1", Via: "http", Time: noon.Add(500 * time.Millisecond),
		Document: json.RawMessage(`{"algorithm":"token_bucket","routes":{"fast":{"capacity":20}}}`),
	}
	audit = events.Audit{
		Time: noon, Action: "config.change", By: "192.0.2.7", Via: "nats", Result: "unauthenticated", Detail: "X-Admin-Token is missing",
		Target: "user:ann", Actor: "bea", Reason: "support case 17",
	}
	changed = events.BucketsChanged{Buckets: []events.ChangedBucket{
		{Client: "user:ann", Scope: "fast"}, {Client: "ip:2001:db8::/64"},
	}}
	deferred = events.Deferred{ID: "4kq2", Client: "user:ann", Request: []byte("{}"), Sealed: true}
	deferral = events.Deferral{
		ID: "4kq2", Client: "user:ann", Route: "fast", Seq: 17, Time: 1764460800123456, State: events.DeferralFailed,
		Once: true, Digest: []byte{1, 2}, Reason: "it may have run", Result: []byte("{}"), Sealed: true,
	}
	deadLetter = events.DeadLetter{
		Stream: events.StreamResponses, Seq: 31, Subject: events.SubjectResponse("x"), Reason: "malformed", Data: []byte(`{"type":`),
	}
)

func TestWireForms(t *testing.T) {
	t.Parallel()
	t.Run("response", golden("response.v1.json", response, events.Encode, events.Decode))
	t.Run("health", golden("health.v1.json", health, events.Encode, events.Decode))
	t.Run("heartbeat", golden("heartbeat.v1.json", heartbeat, events.Encode, events.Decode))
	t.Run("config", golden("config.v1.json", config, events.Encode, events.Decode))
	t.Run("audit", golden("audit.v1.json", audit, events.Encode, events.Decode))
	t.Run("echo", golden("echo.v1.json", events.Echo{N: 7, Sent: 1_750_000}, events.Encode, events.Decode))
	t.Run("changed", golden("changed.v1.json", changed, events.Encode, events.Decode))
	t.Run("deferred", golden("deferred.v1.json", deferred, events.Encode, events.Decode))
	t.Run("deferral", golden("deferral.v1.json", deferral, events.Encode, events.Decode))
	t.Run("deadletter", golden("deadletter.v1.json", deadLetter, events.Encode, events.Decode))
}

// golden shows that file is the wire form of value, in both directions, and that
// a reader of this type refuses every other type, damage and truncation.
func golden[M any](file string, value M, encode func(M) ([]byte, error), decode func([]byte) (M, error)) func(*testing.T) {
	return func(t *testing.T) {
		t.Parallel()
		data, err := os.ReadFile(filepath.Join("testdata", file))
		if err != nil {
			t.Fatal(err)
		}
		got, err := decode(data)
		if err != nil {
			t.Fatal(err)
		}
		// A raw document comes as it stood in the file, spaces included; compare what it says.
		if c, ok := any(&got).(*events.ConfigVersion); ok {
			c.Document = compact(t, c.Document)
		}
		if diff := cmp.Diff(value, got); diff != "" {
			t.Errorf("decoded (-want +got):\n%s", diff)
		}
		wire, err := encode(value)
		if err != nil {
			t.Fatal(err)
		}
		if want := compact(t, data); !bytes.Equal(wire, want) {
			t.Errorf("encoded\n%s\nwant\n%s", wire, want)
		}

		future := bytes.Replace(wire, []byte(`.v1"`), []byte(`.v2"`), 1)
		if _, err := decode(future); !errors.Is(err, events.ErrType) {
			t.Errorf("another version: got %v, want ErrType", err)
		}
		if _, err := decode([]byte(`{"boot":"b"}`)); !errors.Is(err, events.ErrType) {
			t.Errorf("no type: got %v, want ErrType", err)
		}
		for cut := range len(wire) {
			if _, err := decode(wire[:cut]); !errors.Is(err, events.ErrMalformed) {
				t.Fatalf("cut at %d: got %v, want ErrMalformed", cut, err)
			}
		}
		if _, err := decode(append(bytes.Clone(wire), '}')); !errors.Is(err, events.ErrMalformed) {
			t.Errorf("trailing data: got %v, want ErrMalformed", err)
		}
		more := append(bytes.Clone(wire[:len(wire)-1]), `,"later":{"x":1}}`...)
		if _, err := decode(more); err != nil {
			t.Errorf("a field of a later writer: got %v, want it ignored", err)
		}
		var empty M
		if _, err := encode(empty); !errors.Is(err, events.ErrMalformed) {
			t.Errorf("encode an empty value: got %v, want ErrMalformed", err)
		}
	}
}

func compact(t *testing.T, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := json.Compact(&b, data); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestTypesAreDistinct(t *testing.T) {
	t.Parallel()
	data, err := events.Encode(health)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := events.Decode[events.ResponseBatch](data); !errors.Is(err, events.ErrType) {
		t.Errorf("a health message read as a response batch: got %v, want ErrType", err)
	}
}

// TestRefusedFigures edits the golden batch, one field at a time; a settler
// must never act on such a message.
func TestRefusedFigures(t *testing.T) {
	t.Parallel()
	data, err := events.Encode(response)
	if err != nil {
		t.Fatal(err)
	}
	for _, edit := range []struct{ old, new, names string }{
		{`"n":42`, `"n":0`, "n must be set"},
		{`"n":42`, `"n":-1`, "n"},
		{`"n":42`, `"n":4.5`, "n"},
		{`"boot":"edge-7f3a-1764460800000000"`, `"boot":""`, "boot"},
		{`"id":"01JDX0M4"`, `"id":""`, "events[0]"},
		{`"client":"u:alice"`, `"client":""`, "events[0]"},
		{`"base":1000000`, `"base":-1`, "base"},
		{`"base":1000000`, `"base":100000000000001`, "base"},
		{`"base":1000000`, `"base":1e400`, "base"},
		{`"base":1000000`, `"base":"1"`, "base"},
		{`"time":1764460800123456`, `"time":0`, "time"},
		{`"latency":12345`, `"latency":-1`, "durations"},
		{`"spec":1`, `"spec":3`, "charges[1]"},
		{`"spec":1`, `"spec":-1`, "charges[1]"},
		{`"scope":"@day"`, `"scope":""`, "charges[2]"},
		{`"how":"local"`, `"how":"maybe"`, `"maybe"`},
		{`"outcome":"ok"`, `"outcome":"fine"`, `"fine"`},
		{`"capacity":20000000`, `"capacity":20000001`, "specs[0]"},
		{`"window":60`, `"window":0`, "specs[1]"},
		{`"kind":"daily_quota"`, `"kind":"leaky"`, "specs[2]"},
		{`"events":[`, `"events":[null,`, "events[0]"},
	} {
		damaged := strings.Replace(string(data), edit.old, edit.new, 1)
		if damaged == string(data) {
			t.Fatalf("the golden batch has no %s", edit.old)
		}
		_, err := events.Decode[events.ResponseBatch]([]byte(damaged))
		if !errors.Is(err, events.ErrMalformed) || !strings.Contains(err.Error(), edit.names) {
			t.Errorf("%s: got %v, want ErrMalformed naming %s", edit.new, err, edit.names)
		}
	}
}

func FuzzDecodeResponseBatch(f *testing.F) {
	data, err := os.ReadFile(filepath.Join("testdata", "response.v1.json"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte(`{"type":"aegis.response.v1","boot":"b","n":1,"events":[]}`))
	f.Add([]byte(`{"type":"aegis.response.v1","boot":"b","n":1,"events":null,"specs":[{}]}`))
	f.Add([]byte(`[]`))
	f.Add([]byte(`{"type":null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		batch, err := events.Decode[events.ResponseBatch](data)
		if err != nil {
			if !errors.Is(err, events.ErrType) && !errors.Is(err, events.ErrMalformed) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		for _, e := range batch.Events {
			for _, c := range e.Charges {
				if err := batch.Specs[c.Spec].Validate(); err != nil {
					t.Fatalf("a charge on a spec out of range: %v", err)
				}
			}
		}
		wire, err := events.Encode(batch)
		if err != nil {
			t.Fatalf("accepted, but cannot be written: %v", err)
		}
		again, err := events.Decode[events.ResponseBatch](wire)
		if err != nil {
			t.Fatalf("written, but cannot be read: %v\n%s", err, wire)
		}
		if diff := cmp.Diff(batch, again, cmp.Transformer("empty", noNil)); diff != "" {
			t.Fatalf("changed by writing and reading (-before +after):\n%s", diff)
		}
	})
}

// noNil counts an empty list as none: "omitempty" lists come back so.
func noNil(specs []bucket.Spec) []bucket.Spec { return append([]bucket.Spec{}, specs...) }

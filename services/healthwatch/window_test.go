package healthwatch

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

func TestSampleOf(t *testing.T) {
	t.Parallel()
	e := func(status int, outcome events.Outcome, latency, duration int64) events.Response {
		return events.Response{Time: 1000, Status: status, Outcome: outcome, Latency: latency, Duration: duration}
	}
	for _, c := range []struct {
		name  string
		event events.Response
		want  sample
		none  bool
	}{
		{name: "answer", event: e(200, events.OutcomeOK, 50, 90), want: sample{at: 1050, latency: 50}},
		{name: "client error is no fault of the upstream", event: e(404, events.OutcomeOK, 50, 90), want: sample{at: 1050, latency: 50}},
		{name: "499 and 500", event: e(500, events.OutcomeOK, 50, 90), want: sample{at: 1050, latency: 50, failed: true}},
		{name: "timeout", event: e(0, events.OutcomeTimeout, 0, 900), want: sample{at: 1900, latency: 900, failed: true}},
		{name: "timeout, latency given", event: e(0, events.OutcomeTimeout, 900, 0), want: sample{at: 1900, latency: 900, failed: true}},
		{name: "reset before the head", event: e(0, events.OutcomeReset, 0, 70), want: sample{at: 1070, latency: 70, failed: true}},
		{name: "reset amid the body", event: e(200, events.OutcomeReset, 20, 70), want: sample{at: 1020, latency: 20, failed: true}},
		{name: "unreached", event: e(0, events.OutcomeUnreached, 0, 5), want: sample{at: 1005, latency: 5, failed: true}},
		{name: "client left after the head", event: e(200, events.OutcomeAborted, 20, 70), want: sample{at: 1020, latency: 20}},
		{name: "client left before the head", event: e(0, events.OutcomeAborted, 0, 70), none: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			got, ok := sampleOf(c.event)
			if ok == c.none || got != c.want {
				t.Errorf("got %+v, %v; want %+v", got, ok, c.want)
			}
		})
	}
}

func TestNearestRank(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]int64{1: 1, 2: 2, 3: 3, 19: 19, 20: 19, 21: 20, 30: 29, 100: 95, 1000: 950} {
		w := window{size: n}
		for i := n; i >= 1; i-- { // a permutation
			w.add(sample{at: int64(i), latency: int64(i)})
		}
		if got := w.stats().p95; got != want {
			t.Errorf("p95 of 1 to %d: %d, want %d", n, got, want)
		}
	}
}

// The window against a twin that sorts everything it ever saw.
func TestWindowProperty(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := window{size: rapid.IntRange(1, 12).Draw(t, "size")}
		var all []sample
		oldest := int64(0)
		for i := range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0:
				oldest += rapid.Int64Range(0, 10).Draw(t, "age")
				w.age(oldest)
				all = slices.DeleteFunc(all, func(s sample) bool { return s.at < oldest })
			case 1:
				w.resize(rapid.IntRange(1, 12).Draw(t, "resize"))
			default:
				s := sample{
					at:      oldest + rapid.Int64Range(0, 20).Draw(t, "at"),
					latency: int64(i),
					failed:  rapid.Bool().Draw(t, "failed"),
				}
				w.add(s)
				all = append(all, s)
			}
			slices.SortStableFunc(all, func(a, b sample) int { return int(a.at - b.at) })
			all = all[max(0, len(all)-w.size):]
			if !slices.Equal(w.samples, all) {
				t.Fatalf("window %v, want %v", w.samples, all)
			}
		}
	})
}

// Whatever the samples and the rules, M stays within its bounds and moves as it should.
func TestStepProperty(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r := policy.HealthRules{
			SlowP95: rapid.Int64Range(1, 1<<50).Draw(t, "slow"), FastP95: rapid.Int64Range(1, 1<<50).Draw(t, "fast"),
			ErrorRate: rapid.Int64Range(1, bucket.One).Draw(t, "rate"), ClearRate: rapid.Int64Range(1, bucket.One).Draw(t, "clear"),
			Floor: rapid.Int64Range(bucket.FloorMultiplier, bucket.One).Draw(t, "floor"), Decrease: rapid.Int64Range(1, bucket.One-1).Draw(t, "decrease"),
			Increase: rapid.Int64Range(1, bucket.One).Draw(t, "increase"), MinSamples: rapid.IntRange(1, 1000).Draw(t, "min"),
		}
		st := stats{samples: rapid.IntRange(0, 1000).Draw(t, "samples"), p95: rapid.Int64Min(0).Draw(t, "p95")}
		st.failed = rapid.IntRange(0, st.samples).Draw(t, "failed")
		m := rapid.Int64Range(r.Floor, bucket.One).Draw(t, "m")
		next := step(m, st, r)
		if next < r.Floor || next > bucket.One {
			t.Fatalf("M %d out of [%d, 1]", next, r.Floor)
		}
		ill := st.p95 > r.SlowP95 || float64(st.failed)/float64(st.samples) >= float64(r.ErrorRate)/bucket.One
		switch {
		case next < m && (st.samples < r.MinSamples || !ill):
			t.Fatalf("M fell from %d to %d on %+v by %+v", m, next, st, r)
		case next > m && st.samples > 0 && (st.p95 >= r.FastP95 || fmt.Sprint(st.failed) == fmt.Sprint(st.samples) && r.ClearRate < bucket.One):
			t.Fatalf("M rose from %d to %d on %+v by %+v", m, next, st, r)
		case st.samples == 0 && m < bucket.One && next <= m:
			t.Fatalf("M did not recover without samples: %d, %d", m, next)
		}
	})
}

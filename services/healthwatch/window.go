package healthwatch

import (
	"slices"
	"sort"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// sample is what one request tells about its upstream.
type sample struct {
	// at is when the outcome was known, Unix microseconds.
	at int64
	// latency is the time to the response head, or to giving up; microseconds.
	latency int64
	failed  bool
}

// sampleOf is the sample in an event: none where the client left before the
// upstream answered, since how long it would have taken is unknown, nor where it was never asked.
func sampleOf(e events.Response) (sample, bool) {
	s := sample{latency: e.Latency, failed: e.Status >= 500}
	switch e.Outcome {
	case events.OutcomeRefused:
		return sample{}, false
	case events.OutcomeAborted:
		if e.Status == 0 {
			return sample{}, false
		}
	case events.OutcomeTimeout, events.OutcomeReset, events.OutcomeUnreached:
		s.failed = true
		if e.Status == 0 { // no head came; it was waited for all the time
			s.latency = max(e.Latency, e.Duration)
		}
	}
	s.at = e.Time + s.latency
	return s, true
}

// window holds the last samples of an upstream by the time of their outcome,
// whatever the order they come in.
type window struct {
	size    int
	samples []sample // oldest first
}

// add puts s in its place and drops the oldest beyond the window's size.
func (w *window) add(s sample) {
	i := sort.Search(len(w.samples), func(i int) bool { return w.samples[i].at > s.at })
	w.samples = slices.Insert(w.samples, i, s)
	w.trim()
}

// resize changes how many samples are kept.
func (w *window) resize(size int) {
	w.size = size
	w.trim()
}

func (w *window) trim() {
	if over := len(w.samples) - w.size; over > 0 {
		w.samples = slices.Delete(w.samples, 0, over)
	}
}

// age drops what is older than oldest, in Unix microseconds.
func (w *window) age(oldest int64) {
	i := sort.Search(len(w.samples), func(i int) bool { return w.samples[i].at >= oldest })
	w.samples = slices.Delete(w.samples, 0, i)
}

// stats sums up the samples.
func (w *window) stats() stats {
	st := stats{samples: len(w.samples)}
	if st.samples == 0 {
		return st
	}
	latencies := make([]int64, 0, len(w.samples))
	for _, s := range w.samples {
		latencies = append(latencies, s.latency)
		if s.failed {
			st.failed++
		}
	}
	slices.Sort(latencies)
	st.p95 = latencies[(95*len(latencies)+99)/100-1] // nearest rank: ceil(0.95 n)
	return st
}

// stats is what a window says about an upstream.
type stats struct {
	samples, failed int
	// p95 is the nearest-rank 95th percentile of the latencies, in microseconds; 0 without samples.
	p95 int64
}

// errorRate is the share of failed requests in millionths, rounded down; 0 without samples.
func (s stats) errorRate() int64 {
	if s.samples == 0 {
		return 0
	}
	return int64(s.failed) * bucket.One / int64(s.samples)
}

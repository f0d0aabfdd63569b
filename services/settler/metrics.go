package settler

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// metrics are what a settler counts. Each settler reads every event, so the first
// two agree among replicas; a delta is counted by the replica that applied it.
type metrics struct {
	events  *prometheus.CounterVec
	invalid *prometheus.CounterVec

	settlements *prometheus.CounterVec
	deltas      prometheus.Counter
	taken       prometheus.Counter
	refunded    prometheus.Counter
	forgiven    prometheus.Counter

	failures    prometheus.Counter
	rewinds     prometheus.Counter
	losses      prometheus.Counter
	expired     prometheus.Counter
	deadLetters prometheus.Counter
	purged      prometheus.Counter

	parked     prometheus.Gauge
	lag        prometheus.Gauge
	lagSeconds prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "aegis", Subsystem: "settler", Name: name, Help: help})
	}
	counters := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "aegis", Subsystem: "settler", Name: name, Help: help}, []string{label})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "aegis", Subsystem: "settler", Name: name, Help: help})
	}
	m := &metrics{
		events:      counters("events_total", "Response events read, by what their cost rests on.", "basis"),
		invalid:     counters("invalid_costs_total", "X-Compute-Cost values not believed, by reason; the base cost stayed.", "reason"),
		settlements: counters("settlements_total", "Settlements of a message into a shard, by the store's answer; duplicate and rewind are its guards at work.", "status"),
		deltas:      counter("deltas_total", "Bucket deltas that this replica applied."),
		taken:       counter("taken_tokens_total", "Tokens that this replica's settlements took besides the base costs."),
		refunded:    counter("refunded_tokens_total", "Tokens that this replica's settlements gave back, before the cap at a bucket's capacity."),
		forgiven:    counter("forgiven_tokens_total", "Tokens that a bucket owed beyond its max_debt and was let off."),
		failures:    counter("store_failures_total", "Settlements that the store did not answer; the shard was parked."),
		rewinds:     counter("rewinds_total", "Shards found at an earlier cursor than before."),
		losses:      counter("losses_total", "Shards found without settlement state in this stream, and begun."),
		expired:     counter("expired_messages_total", "Messages that left the stream before a shard had settled them; summed over shards."),
		deadLetters: counter("dead_letters_total", "Messages set aside as dead letters."),
		purged:      counter("purged_messages_total", "Settled messages removed from the stream."),
		parked:      gauge("parked_shards", "Shards that wait for their store or catch up."),
		lag:         gauge("lag_messages", "Messages of the stream that some shard has not settled."),
		lagSeconds:  gauge("lag_seconds", "Age of the oldest message that some shard has not settled, to ten seconds."),
	}
	for _, c := range []prometheus.Collector{
		m.events, m.invalid, m.settlements, m.deltas, m.taken, m.refunded, m.forgiven, m.failures, m.rewinds,
		m.losses, m.expired, m.deadLetters, m.purged, m.parked, m.lag, m.lagSeconds,
	} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// read counts a message that was read for the first time.
func (m *metrics) read(t tally) {
	for by, n := range t.events {
		m.events.WithLabelValues(string(by)).Add(float64(n))
	}
	for why, n := range t.invalid {
		m.invalid.WithLabelValues(string(why)).Add(float64(n))
	}
	m.forgiven.Add(tokens(t.clamped))
}

// settled counts the store's answer to a message's settlement.
func (m *metrics) settled(st store.Settlement, done store.Settled) {
	if st.Boot == "" {
		if done.Status == store.Rewind {
			m.rewinds.Inc()
		}
		return // an idle shard's cursor
	}
	m.settlements.WithLabelValues(string(done.Status)).Inc()
	switch done.Status {
	case store.Rewind:
		m.rewinds.Inc()
	case store.Applied:
		m.deltas.Add(float64(len(st.Items)))
		for _, it := range st.Items {
			if it.Delta > 0 {
				m.taken.Add(tokens(it.Delta))
			} else {
				m.refunded.Add(tokens(-it.Delta))
			}
		}
		for _, b := range done.Items {
			m.forgiven.Add(tokens(b.Forgiven))
		}
	}
}

func tokens(micro int64) float64 { return float64(micro) / bucket.One }

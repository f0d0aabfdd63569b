package healthwatch

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// metrics are what a replica counts.
type metrics struct {
	events    prometheus.Counter
	malformed *prometheus.CounterVec
	ticks     prometheus.Counter
	conflicts prometheus.Counter
	failures  prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, last func() map[string]events.Health) (*metrics, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "aegis", Subsystem: "healthwatch", Name: name, Help: help})
	}
	m := &metrics{
		events: counter("events_total", "Response events folded."),
		malformed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "aegis", Subsystem: "healthwatch", Name: "malformed_total", Help: "Messages that could not be used, by stream.",
		}, []string{"stream"}),
		ticks:     counter("ticks_total", "Ticks that this replica published."),
		conflicts: counter("conflicts_total", "Ticks that another replica published first."),
		failures:  counter("failures_total", "Ticks that could not be published."),
	}
	for _, c := range []prometheus.Collector{m.events, m.malformed, m.ticks, m.conflicts, m.failures, upstreamCollector{last}} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// upstreamCollector shows the last tick of every upstream that the policy names now.
type upstreamCollector struct {
	last func() map[string]events.Health
}

var (
	multiplierDesc = upstreamDesc("multiplier", "Multiplier of the limits of the upstream's routes, 0.2 to 1.")
	p95Desc        = upstreamDesc("p95_seconds", "95th percentile latency of the upstream.")
	errorDesc      = upstreamDesc("error_ratio", "Share of the upstream's requests that failed, 0 to 1.")
)

func upstreamDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("aegis_upstream_"+name, help, []string{"upstream"}, nil)
}

func (c upstreamCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- multiplierDesc
	ch <- p95Desc
	ch <- errorDesc
}

func (c upstreamCollector) Collect(ch chan<- prometheus.Metric) {
	for name, h := range c.last() {
		if h.Tick == 0 {
			continue // none yet
		}
		ch <- prometheus.MustNewConstMetric(multiplierDesc, prometheus.GaugeValue, float64(h.Multiplier)/bucket.One, name)
		ch <- prometheus.MustNewConstMetric(p95Desc, prometheus.GaugeValue, float64(h.P95)/1e6, name)
		ch <- prometheus.MustNewConstMetric(errorDesc, prometheus.GaugeValue, float64(h.ErrorRate)/bucket.One, name)
	}
}

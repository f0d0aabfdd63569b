package edge

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/aegisrate/aegisrate/services/edge/admission"
)

type metrics struct {
	rejected       prometheus.Counter
	unknownKeys    prometheus.Counter
	snapshotErrors prometheus.Counter
	badHealth      prometheus.Counter
	badRules       prometheus.Counter
	lookupErrors   prometheus.Counter
}

// newMetrics registers what s counts and what it can be asked for.
func newMetrics(reg prometheus.Registerer, s *Service) *metrics {
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
		reg.MustRegister(c)
		return c
	}
	gauge := func(name, help string, value func() float64) {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value))
	}
	total := func(name, help string, value func() uint64) {
		reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(value()) }))
	}
	gauge("aegis_edge_policy_version", "Version of the policy in force; 0: the policy file's, or none.", func() float64 {
		if t := s.engine.Table(); t != nil {
			return float64(t.Version())
		}
		return 0
	})
	gauge("aegis_edge_degraded", "1 while requests are decided without the shared store.", func() float64 {
		if s.engine.Degraded() {
			return 1
		}
		return 0
	})
	gauge("aegis_edge_live_edges", "Live edges, this one included; the share of each limit that is admitted while degraded is one by it.", func() float64 {
		return float64(s.engine.Fleet.Live())
	})
	gauge("aegis_edge_events_queued", "Finished requests that wait for the event log.", func() float64 { return float64(s.outbox.Stats().Queued) })
	gauge("aegis_edge_events_oldest_seconds", "Age of the oldest of them.", func() float64 { return s.outbox.Stats().Oldest.Seconds() })
	gauge("aegis_edge_spool_bytes", "Size of those that are kept on disk meanwhile.", func() float64 { return float64(s.outbox.Stats().Spooled) })
	total("aegis_edge_events_published_total", "Finished requests in the event log.", func() uint64 { return s.outbox.Stats().Published })
	total("aegis_edge_events_lost_total", "Finished requests that never reached the event log.", func() uint64 { return s.outbox.Stats().Lost })

	reg.MustRegister(shares{s.engine})

	counts := s.engine.Counts()
	total("aegis_edge_store_unknown_total", "Calls to the store without an answer, counted as charged.", counts.Unknown.Load)
	total("aegis_edge_store_unavailable_total", "Calls to the store that did not run.", counts.Unavailable.Load)
	total("aegis_edge_store_unreadable_total", "Calls to the store that found an unreadable state.", counts.Unreadable.Load)
	total("aegis_edge_open_decisions_total", "Requests over their limits that passed because their route is open without the store.", counts.Open.Load)
	total("aegis_edge_closed_decisions_total", "Requests refused because their route is closed without the store.", counts.Closed.Load)
	total("aegis_edge_healed_total", "Buckets that the store had lost, and that went on from what this edge had seen of them.", counts.Healed.Load)
	total("aegis_edge_local_decisions_total", "Requests decided without the shared store.", counts.Local.Load)
	total("aegis_edge_leases_returned_total", "Leases that went back to the store unspent.", counts.LeasesReturned.Load)
	total("aegis_edge_leases_lost_total", "Leases whose unspent tokens could not go back: lost to the client.", counts.LeasesLost.Load)

	memory := s.engine.Memory
	gauge("aegis_edge_remembered", "Routes of clients with a lease, a denial or much traffic.", func() float64 { return float64(memory.Stats().Keys) })
	gauge("aegis_edge_leases", "Of those, the ones that hold tokens.", func() float64 { return float64(memory.Stats().Leased) })
	total("aegis_edge_lease_hits_total", "Requests paid for from a lease, without asking the store.", func() uint64 { return memory.Stats().LeaseHits })
	total("aegis_edge_remembered_denials_total", "Requests refused from memory, without asking the store.", func() uint64 { return memory.Stats().Denials })
	total("aegis_edge_forgotten_total", "Routes of clients that were forgotten to make room.", func() uint64 { return memory.Stats().Forgotten })
	return &metrics{
		rejected:       counter("aegis_edge_policy_rejected_total", "Policy versions refused; the last good one stayed."),
		unknownKeys:    counter("aegis_edge_policy_unknown_keys_total", "Keys of accepted policies that this edge does not know."),
		snapshotErrors: counter("aegis_edge_policy_snapshot_errors_total", "Policies and rules that could not be kept on disk."),
		badHealth:      counter("aegis_edge_health_rejected_total", "Health ticks refused."),
		badRules:       counter("aegis_edge_rules_rejected_total", "Records of the rules that could not be read."),
		lookupErrors:   counter("aegis_edge_rules_lookup_errors_total", "Look-ups of clients that got no answer."),
	}
}

// shares tells, when asked, how much this edge would admit alone.
type shares struct{ engine *admission.Engine }

var shareDesc = prometheus.NewDesc("aegis_edge_fallback_share_tokens",
	"What this edge alone admits at once to one client without a key, by route: the bound of a local fallback, with its part of the refill.",
	[]string{"route"}, nil)

func (s shares) Describe(ch chan<- *prometheus.Desc) { ch <- shareDesc }

func (s shares) Collect(ch chan<- prometheus.Metric) {
	for route, tokens := range s.engine.Shares() {
		ch <- prometheus.MustNewConstMetric(shareDesc, prometheus.GaugeValue, float64(tokens), route)
	}
}

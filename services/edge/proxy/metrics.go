package proxy

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// metrics have labels from the policy and fixed sets only, so that no client can add a series.
type metrics struct {
	requests  *prometheus.CounterVec
	responses *prometheus.CounterVec
	outcomes  *prometheus.CounterVec
	decision  prometheus.Histogram
	upstream  *prometheus.HistogramVec
	badCost   *prometheus.CounterVec
	yellow    *prometheus.CounterVec
	panics    prometheus.Counter

	llmRefused, llmTokens, llmSettled *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer, h *Handler) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "aegis_edge_requests_total",
			Help: "Requests by route and tier; a tier of none was refused before any limit, exempt is an admin, preflight a browser's free question.",
		}, []string{"route", "tier"}),
		responses: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "aegis_edge_responses_total",
			Help: "Answers to clients by route and class of status.",
		}, []string{"route", "class"}),
		outcomes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "aegis_edge_upstream_outcomes_total",
			Help: "Forwarded requests by upstream and how they ended.",
		}, []string{"upstream", "outcome"}),
		decision: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "aegis_edge_decision_seconds",
			Help:    "Time to decide a request, the call to the store included.",
			Buckets: prometheus.ExponentialBuckets(20e-6, 2, 12),
		}),
		upstream: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "aegis_edge_upstream_seconds",
			Help:    "Time to the upstream's response head.",
			Buckets: prometheus.ExponentialBuckets(1e-3, 2, 15),
		}, []string{"upstream"}),
		badCost: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "aegis_edge_compute_cost_ambiguous_total",
			Help: "Answers with more than one X-Compute-Cost, by upstream.",
		}, []string{"upstream"}),
		yellow: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "aegis_edge_yellow_answers_total",
			Help: "Yellow requests by route and what they got: stored, deferred or refused.",
		}, []string{"route", "answer"}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "aegis_edge_panics_total",
			Help: "Requests that ended in a panic of the edge.",
		}),
	}
	m.llmRefused = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "aegis_edge_llm_refused_total",
		Help: "Calls over a limit of an LLM route, by route and limit (@rpm, @tpm, @rps); those that shadow mode let pass too.",
	}, []string{"route", "limit"})
	m.llmTokens = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "aegis_edge_llm_tokens_total",
		Help: "Tokens of calls held to a budget: reserved before, and used in the end.",
	}, []string{"route", "kind"})
	m.llmSettled = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "aegis_edge_llm_settled_total",
		Help: "Such calls by what their settlement rests on: the usage told, an estimate of what was sent, the reserve kept for want of usage (estimate), nothing used (refund). Besides: absurd usage passed over, and settlements lost.",
	}, []string{"route", "by"})
	if h.llm != nil {
		reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "aegis_edge_llm_forgiven_tokens_total",
			Help: "Tokens of debt let go, since they reached too many minutes ahead.",
		}, func() float64 { return float64(h.llm.Forgiven()) }))
	}
	reg.MustRegister(m.llmRefused, m.llmTokens, m.llmSettled)
	reg.MustRegister(m.requests, m.responses, m.outcomes, m.decision, m.upstream, m.badCost, m.yellow, m.panics)
	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "aegis_edge_cache_bytes",
		Help: "About how much the stored answers take.",
	}, func() float64 { return float64(h.cache.Bytes()) }))
	return m
}

func (m *metrics) decided(d *admission.Decision) {
	route, tier := "", "none"
	if d.Route != nil {
		route = d.Route.Name
	}
	switch {
	case d.Exempt:
		tier = "exempt"
	case len(d.Upstream.URLs) > 0 && d.Action != admission.Unavailable && d.Action != admission.StoreAway:
		tier = d.Tier.String()
	}
	m.requests.WithLabelValues(route, tier).Inc()
}

func (m *metrics) answered(d *admission.Decision, status int) {
	route := ""
	if d.Route != nil {
		route = d.Route.Name
	}
	m.responses.WithLabelValues(route, strconv.Itoa(status/100)+"xx").Inc()
}

package controlplane

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	version prometheus.Gauge
	bad     prometheus.Counter
	// changes that were let in, and refused callers, by way and result.
	changes *prometheus.CounterVec
	refused *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer, auditLost func() float64) (*metrics, error) {
	m := &metrics{
		version: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "aegis_controlplane_config_version", Help: "Config version in force.",
		}),
		bad: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "aegis_controlplane_bad_versions_total", Help: "Messages of the config stream that are no good version.",
		}),
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "aegis_controlplane_changes_total", Help: "Changes asked for by callers with the right token, by way and result.",
		}, []string{"via", "result"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "aegis_controlplane_refused_total", Help: "Callers turned away, by way and reason.",
		}, []string{"via", "reason"}),
	}
	lost := prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "aegis_controlplane_audit_lost_total", Help: "Audit events that could not be kept.",
	}, auditLost)
	for _, c := range []prometheus.Collector{m.version, m.bad, m.changes, m.refused, lost} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

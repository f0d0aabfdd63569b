package telemetry

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Registry holds the metrics of one service. Everything registered with it
// carries the label "service".
type Registry struct {
	prometheus.Registerer
	prometheus.Gatherer
}

// NewRegistry gives a registry with the metrics of the Go runtime and the process.
func NewRegistry(service string) *Registry {
	reg := prometheus.NewRegistry()
	r := &Registry{
		Registerer: prometheus.WrapRegistererWith(prometheus.Labels{"service": service}, reg),
		Gatherer:   reg,
	}
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

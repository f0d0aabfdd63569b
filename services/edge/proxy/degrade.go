package proxy

import (
	"net/http"

	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// degrade answers a yellow request, which its grace has paid for.
func (h *Handler) degrade(w *recorder, r *http.Request, d *admission.Decision) {
	if d.Route.Degrade == policy.DegradeCache && h.answerStored(w, r, d) {
		h.metrics.yellow.WithLabelValues(d.Route.Name, "stored").Inc()
		return
	}
	h.deferRequest(w, r, d)
}

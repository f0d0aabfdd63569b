package controlplane

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// service is how `nats micro ls` shows the controlplane.
var service = bus.ServiceInfo{
	Name:        "aegis-config",
	Version:     "1.0.0",
	Description: "Changes AegisRate's policy; takes the JSON of POST /api/control, with X-Admin-Token as a header",
	Endpoint:    "change",
	Subject:     events.SubjectConfigCommand,
}

// serveNATS takes commands over NATS until ctx ends.
func (s *Service) serveNATS(ctx context.Context) error {
	sub, err := s.bus.Serve(service, func(r bus.Request) ([]byte, *bus.ServiceError) {
		reply, refusal := s.command(ctx, r)
		if refusal == nil {
			return toJSON(reply), nil
		}
		// A plain publish gets no answer, so the log is where its sender can look.
		s.log.Warn().Int("status", refusal.Status).Str("detail", refusal.Detail).Msg("a command over NATS was refused")
		return toJSON(refusal), &bus.ServiceError{Code: strconv.Itoa(refusal.Status), Description: oneLine(refusal.Detail)}
	})
	if err != nil {
		return err
	}
	<-ctx.Done()
	sub.Stop()
	return nil
}

func (s *Service) command(ctx context.Context, r bus.Request) (events.ConfigReply, *problem) {
	if refusal, fresh := s.gate.nats(r.Header, time.Now()); refusal != nil {
		s.metrics.refused.WithLabelValues("nats", refusal.result()).Inc()
		if fresh {
			s.audit(events.Audit{Action: actionChange, By: "nats", Via: "nats", Result: refusal.result(), Detail: refusal.Detail})
		}
		return events.ConfigReply{}, refusal
	}
	ifMatch := ""
	for name, values := range r.Header {
		if strings.EqualFold(name, "If-Match") {
			ifMatch = strings.Join(values, ",")
		}
	}
	return s.change(ctx, change{by: "nats", via: "nats", body: r.Data, ifMatch: ifMatch})
}

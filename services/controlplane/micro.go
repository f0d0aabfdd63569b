package controlplane

import (
	"bytes"
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// services are how `nats micro ls` shows the controlplane.
var (
	configService = bus.ServiceInfo{
		Name:        "aegis-config",
		Version:     "1.0.0",
		Description: "Changes AegisRate's policy; takes the JSON of POST /api/control, with X-Admin-Token as a header",
		Endpoint:    "change",
		Subject:     events.SubjectConfigCommand,
	}
	controlService = bus.ServiceInfo{
		Name:        "aegis-control",
		Version:     "1.0.0",
		Description: "AegisRate's admin API: " + events.HeaderMethod + ", " + events.HeaderPath + " and X-Admin-Token as headers, the body as data",
		Endpoint:    "request",
		Subject:     events.SubjectControl,
	}
)

// serveNATS takes requests over NATS until ctx ends: any of the API, or the plain change of
// events.SubjectConfigCommand, which is POST /api/control.
func (s *Service) serveNATS(ctx context.Context) error {
	api := s.api()
	for _, service := range []bus.ServiceInfo{configService, controlService} {
		sub, err := s.bus.Serve(service, func(r bus.Request) ([]byte, *bus.ServiceError) {
			method, path := http.MethodPost, "/api/control"
			if r.Subject != events.SubjectConfigCommand {
				method, path = header(r, events.HeaderMethod), header(r, events.HeaderPath)
			}
			a := s.request(ctx, api, method, path, r)
			if a.status < http.StatusBadRequest {
				return bytes.TrimSpace(a.body.Bytes()), nil
			}
			// A plain publish gets no answer, so the log is where its sender can look.
			s.log.Warn().Int("status", a.status).Str("detail", a.detail).Msg("a command over NATS was refused")
			return bytes.TrimSpace(a.body.Bytes()), &bus.ServiceError{Code: strconv.Itoa(a.status), Description: oneLine(a.detail)}
		})
		if err != nil {
			return err
		}
		defer sub.Stop()
	}
	<-ctx.Done()
	return nil
}

// request hands a message to the API as the HTTP request that it stands for.
func (s *Service) request(ctx context.Context, api http.Handler, method, path string, m bus.Request) *recorder {
	a := &recorder{header: http.Header{}, status: http.StatusOK}
	if refusal, fresh := s.gate.nats(m.Header, time.Now()); refusal != nil {
		s.turnedAway("nats", "nats", actionOf(method, path), refusal, fresh)
		answer(a, refusal)
		return a
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://nats"+path, bytes.NewReader(m.Data))
	if err != nil || !strings.HasPrefix(path, "/") {
		answer(a, refuse(http.StatusBadRequest, "%s and %s must be an HTTP method and a path", events.HeaderMethod, events.HeaderPath))
		return a
	}
	for _, name := range []string{"If-Match", actorHeader, reasonHeader} {
		if v := header(m, name); v != "" {
			r.Header.Set(name, v)
		}
	}
	api.ServeHTTP(a, r.WithContext(withCaller(ctx, callerOf(r, "nats", "nats"))))
	return a
}

// header is a header of a message, whose names keep the case that they were sent in.
func header(m bus.Request, name string) string {
	for k, values := range m.Header {
		if strings.EqualFold(k, name) {
			return strings.Join(values, ",")
		}
	}
	return ""
}

// recorder takes an answer that does not go to an HTTP connection.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
	detail string // of a problem
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(p []byte) (int, error) { return r.body.Write(p) }

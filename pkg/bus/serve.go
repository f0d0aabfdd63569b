package bus

import (
	"context"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
)

// ServiceInfo describes a NATS micro service with one endpoint.
type ServiceInfo struct {
	// Name consists of letters, digits, '-' and '_'; Version is semantic.
	Name        string
	Version     string
	Description string
	// Endpoint is the endpoint's name, Subject where it listens.
	Endpoint string
	Subject  string
}

// Request is one call of a service.
type Request struct {
	Subject string
	Data    []byte
	Header  map[string][]string
}

// ServiceError refuses a request: a code of three digits as in HTTP, and what is wrong.
type ServiceError struct {
	Code        string
	Description string
}

// Serve answers requests as a micro service: `nats micro ls` finds it, and of
// several servers of one name only one gets a request. fn is called for one
// request at a time; a plain publish reaches it too, its answer goes nowhere.
func (b *Bus) Serve(info ServiceInfo, fn func(Request) (reply []byte, refusal *ServiceError)) (Subscription, error) {
	handle := func(r micro.Request) {
		reply, refusal := fn(Request{Subject: r.Subject(), Data: r.Data(), Header: nats.Header(r.Headers())})
		if r.Reply() == "" {
			return
		}
		var err error
		if refusal != nil {
			err = r.Error(refusal.Code, refusal.Description, reply)
		} else {
			err = r.Respond(reply)
		}
		if err != nil {
			b.log.Warn().Err(err).Str("subject", r.Subject()).Msg("cannot answer a request")
		}
	}
	svc, err := micro.AddService(b.conn, micro.Config{Name: info.Name, Version: info.Version, Description: info.Description})
	if err != nil {
		return nil, fmt.Errorf("serve %s: %w", info.Name, err)
	}
	if err := svc.AddEndpoint(info.Endpoint, micro.HandlerFunc(handle), micro.WithEndpointSubject(info.Subject)); err != nil {
		return nil, fmt.Errorf("serve %s on %s: %w", info.Name, info.Subject, err)
	}
	return stopFunc(func() {
		if err := svc.Stop(); err != nil && !b.conn.IsClosed() {
			b.log.Warn().Err(err).Str("service", info.Name).Msg("cannot stop the service cleanly")
		}
	}), nil
}

// Call asks a service and waits for its answer, for as long as ctx lasts. The answer of a service that
// refused has the headers Nats-Service-Error-Code and Nats-Service-Error. Its error is ErrUnavailable or
// ErrDenied; the request may have been served then.
func (b *Bus) Call(ctx context.Context, subject string, data []byte, header map[string][]string) (Message, error) {
	ctx, stop := b.calls.begin(ctx, exactly(subject))
	defer stop()
	m, err := b.conn.RequestMsgWithContext(ctx, &nats.Msg{Subject: subject, Data: data, Header: header})
	if err != nil {
		return Message{}, fmt.Errorf("call %s: %w", subject, classify(ctx, err))
	}
	return Message{Subject: m.Subject, Data: m.Data, Header: m.Header}, nil
}

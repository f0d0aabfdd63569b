package bustest

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// Client is a foreign client, as the stock nats CLI is one: it knows nothing of package bus.
type Client struct{ conn *nats.Conn }

// Client connects to the server until the test ends.
func (s *Server) Client(t testing.TB) *Client {
	t.Helper()
	conn, err := nats.Connect("", nats.InProcessServer(s), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return &Client{conn}
}

// Request asks and gives the answer with its headers (`nats req`).
func (c *Client) Request(t testing.TB, subject string, data []byte, header map[string][]string) ([]byte, map[string][]string) {
	t.Helper()
	reply, err := c.conn.RequestMsg(&nats.Msg{Subject: subject, Data: data, Header: header}, 10*time.Second)
	if err != nil {
		t.Fatalf("request %s: %v", subject, err)
	}
	return reply.Data, reply.Header
}

// Publish sends a message and expects no answer (`nats pub`).
func (c *Client) Publish(t testing.TB, subject string, data []byte, header map[string][]string) {
	t.Helper()
	if err := c.conn.PublishMsg(&nats.Msg{Subject: subject, Data: data, Header: header}); err != nil {
		t.Fatalf("publish %s: %v", subject, err)
	}
	if err := c.conn.FlushTimeout(5 * time.Second); err != nil {
		t.Fatalf("publish %s: %v", subject, err)
	}
}

package bus

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"sync"
)

// calls are the operations that wait for an answer now. They are told of what
// NATS reports only to the connection's callbacks, and the caller would see as
// nothing but a timeout: that its publish was denied, and that the connection
// its answer was to come over is gone.
type calls struct {
	mu      sync.Mutex
	waiting map[*call]struct{}
}

type call struct {
	match  func(subject string) bool
	cancel context.CancelCauseFunc
}

var deniedPublish = regexp.MustCompile(`Publish to "([^"]+)"`)

// begin gives a context that ends early, with a cause that says why (ErrDenied
// or ErrUnavailable): when the server refuses a publish to a subject that match
// accepts, and when the connection is lost.
func (c *calls) begin(ctx context.Context, match func(subject string) bool) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	one := &call{match: match, cancel: cancel}
	c.mu.Lock()
	if c.waiting == nil {
		c.waiting = make(map[*call]struct{})
	}
	c.waiting[one] = struct{}{}
	c.mu.Unlock()
	return ctx, func() {
		c.mu.Lock()
		delete(c.waiting, one)
		c.mu.Unlock()
		cancel(nil)
	}
}

// denied takes a permission error as the server words it.
func (c *calls) denied(err error) {
	m := deniedPublish.FindStringSubmatch(err.Error())
	if m == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for one := range c.waiting {
		if one.match(m[1]) {
			one.cancel(fmt.Errorf("%w: may not publish to %q", ErrDenied, m[1]))
		}
	}
}

// lost says that no answer can come any more over the connection that was.
func (c *calls) lost() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for one := range c.waiting {
		one.cancel(fmt.Errorf("%w: the connection was lost before the answer came", ErrUnavailable))
	}
}

// exactly matches one subject.
func exactly(subject string) func(string) bool {
	return func(s string) bool { return s == subject }
}

// apiOf matches the JetStream requests about one stream.
func apiOf(stream string) func(string) bool {
	return func(s string) bool {
		return strings.HasPrefix(s, "$JS.API.") && (strings.HasSuffix(s, "."+stream) || strings.Contains(s, "."+stream+"."))
	}
}

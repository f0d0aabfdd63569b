package bus

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"sync"
)

// denials hands the server's refusals to the operations that wait for an
// answer: NATS itself reports a denied publish only to the connection's error
// callback, and the publisher sees nothing but a timeout.
type denials struct {
	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

type watcher struct {
	match  func(subject string) bool
	cancel context.CancelCauseFunc
}

var deniedPublish = regexp.MustCompile(`Publish to "([^"]+)"`)

// watch gives a context that ends, its cause being ErrDenied, as soon as the
// server refuses a publish to a subject that match accepts.
func (d *denials) watch(ctx context.Context, match func(subject string) bool) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watcher{match: match, cancel: cancel}
	d.mu.Lock()
	if d.watchers == nil {
		d.watchers = make(map[*watcher]struct{})
	}
	d.watchers[w] = struct{}{}
	d.mu.Unlock()
	return ctx, func() {
		d.mu.Lock()
		delete(d.watchers, w)
		d.mu.Unlock()
		cancel(nil)
	}
}

// report takes a permission error as the server words it.
func (d *denials) report(err error) {
	m := deniedPublish.FindStringSubmatch(err.Error())
	if m == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for w := range d.watchers {
		if w.match(m[1]) {
			w.cancel(fmt.Errorf("%w: may not publish to %q", ErrDenied, m[1]))
		}
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

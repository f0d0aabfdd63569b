package deferral

import (
	"sync"
	"time"
)

const (
	// leastStep is the least pause between two requests of a client.
	leastStep = 50 * time.Millisecond
	// overdue is how long after its time a request is taken to have gone to another edge.
	overdue = 5 * time.Second
	// longest bounds a wait, so that a change of limits is noticed.
	longest = 30 * time.Second
)

// line knows which requests of each client wait, as far as this edge has seen them.
type line struct {
	mu      sync.Mutex
	clients map[string]*waiting
}

type waiting struct {
	due  map[uint64]time.Time // by sequence
	each time.Duration        // what the limits take to make room for one
}

// arrive notes a request as it comes from the queue.
func (l *line) arrive(client string, seq uint64, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.clients[client]
	if w == nil {
		if l.clients == nil {
			l.clients = make(map[string]*waiting)
		}
		w = &waiting{due: make(map[uint64]time.Time)}
		l.clients[client] = w
	}
	w.due[seq] = now
}

// turn is how long a request that has arrived must wait for older ones of its client; 0: it is its turn. Then it is
// under way until later or done.
func (l *line) turn(client string, seq uint64, now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.clients[client]
	if w == nil {
		return 0
	}
	ahead, first := 0, time.Time{}
	for s, due := range w.due {
		switch {
		case now.Sub(due) > overdue:
			delete(w.due, s)
		case s < seq:
			ahead++
			if first.IsZero() || due.Before(first) {
				first = due
			}
		}
	}
	var wait time.Duration
	if ahead > 0 {
		wait = min(max(0, first.Sub(now))+time.Duration(ahead)*max(w.each, leastStep), longest)
	}
	w.due[seq] = now.Add(wait)
	return wait
}

// busy says that the request is still under way.
func (l *line) busy(client string, seq uint64, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w := l.clients[client]; w != nil {
		w.due[seq] = now
	}
}

// later puts a request off whose turn it was, and gives for how long. each is what the limits take for one.
func (l *line) later(client string, seq uint64, wait, each time.Duration, now time.Time) time.Duration {
	wait = min(max(wait, leastStep), longest)
	l.mu.Lock()
	defer l.mu.Unlock()
	if w := l.clients[client]; w != nil {
		w.due[seq], w.each = now.Add(wait), each
	}
	return wait
}

// done takes a request out of the line.
func (l *line) done(client string, seq uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w := l.clients[client]; w != nil {
		delete(w.due, seq)
		if len(w.due) == 0 {
			delete(l.clients, client)
		}
	}
}

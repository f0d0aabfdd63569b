package bustest

import (
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy stands between a client and a TCP server, for outages that stopping
// the server does not make: a connection cut, a peer that never answers.
type Proxy struct {
	ln     net.Listener
	target string

	mu    sync.Mutex
	mode  mode
	delay time.Duration // of what the server says
	wake  chan struct{} // closed when the mode changes
	conns map[net.Conn]struct{}
	seen  int
}

type mode int

const (
	pass  mode = iota
	mute       // what the server says is thrown away
	stall      // nothing moves in either direction, nothing is closed
	cut        // connections are closed as they come
)

// NewProxy runs a proxy in front of target ("host:port" or a nats:// URL) until the test ends.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	const scheme = "nats://"
	if len(target) > len(scheme) && target[:len(scheme)] == scheme {
		target = target[len(scheme):]
	}
	p := &Proxy{ln: ln, target: target, wake: make(chan struct{}), conns: make(map[net.Conn]struct{})}
	go p.accept()
	t.Cleanup(func() {
		ln.Close()
		p.Cut()
	})
	return p
}

// Addr is where clients connect, "host:port".
func (p *Proxy) Addr() string { return p.ln.Addr().String() }

// Accepted is how many connections clients have made so far.
func (p *Proxy) Accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen
}

// Mute throws away what the server says from now on: requests arrive, answers are lost.
func (p *Proxy) Mute() { p.set(mute) }

// Stall stops moving bytes, and closes nothing.
func (p *Proxy) Stall() { p.set(stall) }

// Delay passes what the server says only after d, from now on.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Cut closes every connection, and new ones as they come.
func (p *Proxy) Cut() { p.set(cut) }

// Heal passes everything again. Connections that were muted are closed, since
// what they lost can't come back.
func (p *Proxy) Heal() {
	p.mu.Lock()
	muted := p.mode == mute
	p.mu.Unlock()
	if muted {
		p.set(cut)
	}
	p.set(pass)
}

func (p *Proxy) set(m mode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode = m
	close(p.wake)
	p.wake = make(chan struct{})
	if m == cut {
		for c := range p.conns {
			c.Close()
		}
		clear(p.conns)
	}
}

func (p *Proxy) accept() {
	for {
		client, err := p.ln.Accept()
		if err != nil {
			return // closed: the test is over
		}
		server, err := net.DialTimeout("tcp", p.target, time.Second)
		if err != nil {
			client.Close()
			continue
		}
		if !p.keep(client, server) {
			continue
		}
		go p.copy(server, client, false)
		go p.copy(client, server, true)
	}
}

func (p *Proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen++
	for _, c := range conns {
		if p.mode == cut {
			c.Close()
		} else {
			p.conns[c] = struct{}{}
		}
	}
	return p.mode != cut
}

// copy moves bytes until either side is closed.
func (p *Proxy) copy(dst, src net.Conn, answers bool) {
	defer dst.Close()
	defer src.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			m, delay := p.unstalled()
			if m == mute && answers {
				continue
			}
			if answers {
				time.Sleep(delay)
			}
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return // the peer is done, or Cut
		}
	}
}

// unstalled waits while nothing moves and gives the mode and the delay then in force.
func (p *Proxy) unstalled() (mode, time.Duration) {
	for {
		p.mu.Lock()
		m, delay, wake := p.mode, p.delay, p.wake
		p.mu.Unlock()
		if m != stall {
			return m, delay
		}
		<-wake
	}
}

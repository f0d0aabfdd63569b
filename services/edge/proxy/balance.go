package proxy

import (
	"math/rand/v2"
	"net/url"
	"sync"
	"sync/atomic"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

// balancers share out requests among the places of each upstream.
type balancers struct{ byUpstream sync.Map } // name → *balancer

type balancer struct {
	turn  atomic.Uint64
	under sync.Map // URL → *atomic.Int64, requests under way from this edge
}

// pick chooses a place for a request; done must be called when it is over.
func (b *balancers) pick(upstream string, urls []*url.URL, strategy policy.RoutingStrategy) (_ *url.URL, done func()) {
	if len(urls) == 1 {
		return urls[0], func() {}
	}
	one, _ := b.byUpstream.LoadOrStore(upstream, new(balancer))
	return one.(*balancer).pick(urls, strategy)
}

func (b *balancer) pick(urls []*url.URL, strategy policy.RoutingStrategy) (_ *url.URL, done func()) {
	var i int
	switch strategy {
	case policy.Random:
		i = rand.IntN(len(urls))
	default:
		i = int((b.turn.Add(1) - 1) % uint64(len(urls)))
	}
	if strategy == policy.LeastRequest {
		// From the one whose turn it is, so that equals take turns.
		first := i
		for n := range urls {
			if other := (first + n) % len(urls); b.load(urls[other]).Load() < b.load(urls[i]).Load() {
				i = other
			}
		}
	}
	load := b.load(urls[i])
	load.Add(1)
	return urls[i], func() { load.Add(-1) }
}

func (b *balancer) load(u *url.URL) *atomic.Int64 {
	key := u.String()
	if n, ok := b.under.Load(key); ok {
		return n.(*atomic.Int64)
	}
	n, _ := b.under.LoadOrStore(key, new(atomic.Int64))
	return n.(*atomic.Int64)
}

package cache

import (
	"crypto/sha256"
	"encoding/binary"
	"hash/maphash"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/maypok86/otter/v2"
)

const (
	// MaxBody bounds a stored body, in bytes; larger ones are passed on and not kept.
	MaxBody = 1 << 20
	// overhead is what an entry takes besides its text, in bytes, about.
	overhead = 512
)

// Request is what selects an answer.
type Request struct {
	Method string
	// Host and URI (path and query as they came) name the resource; Upstream is who answers for it.
	Host, URI, Upstream string
	// Client is the verified client's id, "" for others.
	Client string
	// Header is the request's as the client sent it.
	Header http.Header
}

// Answer is a stored answer. It must not be changed.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte

	received time.Time     // when its head came
	age      time.Duration // how old it was then
	rules    rules
}

// Cache is safe for concurrent use.
type Cache struct {
	now     func() time.Time
	entries *otter.Cache[string, item]

	mu   sync.Mutex // serialises changes of resources
	next uint64

	// changes counts the invalidations of resources by their hash: an answer that was asked for before one
	// is not stored after it.
	seed    maphash.Seed
	changes [256]atomic.Uint64

	// recording is what unfinished answers hold, in bytes; max bounds it too.
	recording atomic.Int64
	max       int64
}

// item is either a resource or one of its answers.
type item struct {
	resource *resource
	answer   *Answer
	weight   uint32
}

// resource says which request headers select among its answers. The keys of these contain id, so that they
// all go with it.
type resource struct {
	id   uint64
	vary []string
}

// New is a cache of at most maxBytes; with 0 nothing is stored. now must be monotonic as time.Now is.
func New(maxBytes int64, now func() time.Time) *Cache {
	return &Cache{
		now: now,
		entries: otter.Must(&otter.Options[string, item]{
			MaximumWeight: uint64(max(maxBytes, 1)),
			Weigher:       func(_ string, i item) uint32 { return i.weight },
		}),
		seed: maphash.MakeSeed(),
		max:  maxBytes,
	}
}

// Bytes is about how much is stored.
func (c *Cache) Bytes() uint64 { return c.entries.WeightedSize() }

// Get is the stored answer to r and its age, if there is one that r may be given. It may be
// stale by maxStale at the most.
func (c *Cache) Get(r Request, maxStale time.Duration) (*Answer, time.Duration, bool) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return nil, 0, false
	}
	found, ok := c.entries.GetIfPresent(resourceKey(r.Host, r.URI))
	if !ok {
		return nil, 0, false
	}
	found, ok = c.entries.GetIfPresent(answerKey(found.resource, r))
	if !ok {
		return nil, 0, false
	}
	a := found.answer
	age := a.age + c.now().Sub(a.received)
	return a, age, a.rules.allow(r.Header, age, maxStale)
}

// Invalidate forgets every answer of a resource.
func (c *Cache) Invalidate(host, uri string) {
	key := resourceKey(host, uri)
	c.change(key).Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.entries.Invalidate(key)
}

func (c *Cache) change(key string) *atomic.Uint64 {
	return &c.changes[maphash.String(c.seed, key)%uint64(len(c.changes))]
}

// store keeps an answer, unless its resource has changed since the request was sent on.
func (c *Cache) store(r Request, vary []string, a *Answer, change uint64) {
	key := resourceKey(r.Host, r.URI)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.change(key).Load() != change {
		return
	}
	found, ok := c.entries.GetIfPresent(key)
	if !ok || !slices.Equal(found.resource.vary, vary) {
		c.next++
		found = item{resource: &resource{c.next, vary}, weight: uint32(len(key) + overhead)}
		c.entries.Set(key, found)
	}
	weight := len(a.Body) + overhead
	for name, values := range a.Header {
		for _, v := range values {
			weight += len(name) + len(v)
		}
	}
	c.entries.Set(answerKey(found.resource, r), item{answer: a, weight: uint32(weight)})
}

func resourceKey(host, uri string) string { return "r" + strings.ToLower(host) + "\x00" + uri }

// credentials are the request headers whose values no two clients share.
var credentials = [...]string{"Authorization", "Cookie", "Proxy-Authorization", "X-Api-Key"}

// answerKey names an answer by what selects it. Digests keep the credentials out of memory.
func answerKey(res *resource, r Request) string {
	h := sha256.New()
	write := func(s string) {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(s)))
		h.Write(n[:])
		h.Write([]byte(s))
	}
	field := func(name string) {
		values := r.Header.Values(name)
		write(strconv.Itoa(len(values)))
		for _, v := range values {
			write(v)
		}
	}
	write(r.Upstream)
	write(r.Client)
	for _, name := range credentials {
		field(name)
	}
	for _, name := range res.vary {
		field(name)
	}
	return "a" + string(binary.BigEndian.AppendUint64(h.Sum(nil), res.id))
}

// Recording takes an answer while it passes by.
type Recording struct {
	c      *Cache
	req    Request
	change uint64
	sent   time.Time
	vary   []string
	answer *Answer
	held   int64
}

// Begin is called before r is sent to its upstream; nil where the answer can't be stored. End must be called.
// A nil Recording takes everything and keeps nothing.
func (c *Cache) Begin(r Request) *Recording {
	if c.max <= 0 || !storableRequest(r) {
		return nil
	}
	return &Recording{c: c, req: r, change: c.change(resourceKey(r.Host, r.URI)).Load(), sent: c.now()}
}

// Head takes the head of the answer, from which hop-by-hop fields are gone already.
func (rec *Recording) Head(status int, h http.Header) {
	if rec == nil {
		return
	}
	now := rec.c.now()
	rules, ok := rulesOf(rec.req, status, h, now)
	if !ok {
		return
	}
	if rec.vary, ok = varyOf(h); !ok {
		return
	}
	header := maps.Clone(h) // the values are not changed in place
	delete(header, "Age")
	rec.answer = &Answer{Status: status, Header: header, received: now, age: ageOf(h, now, now.Sub(rec.sent)), rules: rules}
}

// Write takes a part of the body.
func (rec *Recording) Write(p []byte) {
	if rec == nil || rec.answer == nil {
		return
	}
	n := int64(len(p))
	rec.held += n
	if rec.c.recording.Add(n) > rec.c.max || rec.held > MaxBody {
		rec.answer = nil
		return
	}
	rec.answer.Body = append(rec.answer.Body, p...)
}

// End stores the answer, if it came whole.
func (rec *Recording) End(whole bool) {
	if rec == nil {
		return
	}
	rec.c.recording.Add(-rec.held)
	if rec.answer != nil && whole {
		rec.answer.Body = slices.Clip(rec.answer.Body)
		rec.c.store(rec.req, rec.vary, rec.answer, rec.change)
	}
	rec.answer = nil
}

package controlplane

import (
	"container/list"
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"time"
)

// tokenHeader carries the admin token, over HTTP and NATS.
const tokenHeader = "X-Admin-Token"

// gate decides who may speak to the controlplane.
type gate struct {
	// digest is the SHA-256 of the admin token; nil: there is none, and only this
	// machine is served.
	digest        *[sha256.Size]byte
	tokenlessNATS bool
	attempts      *attempts
}

// http admits an HTTP request, or says why not. peer is its remote address as
// failures are counted by it. fresh says that the refusal is worth an audit
// event: of a flood of refusals few are.
func (g *gate) http(r *http.Request, now time.Time) (peer string, refusal *problem, fresh bool) {
	addr := remote(r)
	peer = addr.String()
	if g.digest != nil {
		refusal, fresh = g.token(network(addr), r.Header.Values(tokenHeader), now)
		return peer, refusal, fresh
	}
	if reason := notLocal(r, addr); reason != "" {
		return peer, refuse(http.StatusForbidden, "no admin token is configured (AEGIS_ADMIN_TOKEN), so only callers on this machine are served; %s", reason),
			g.attempts.note(network(addr), now)
	}
	return peer, nil, false
}

// nats admits a command over NATS. NATS does not tell who sent it, so all
// senders share one count of failures.
func (g *gate) nats(header map[string][]string, now time.Time) (refusal *problem, fresh bool) {
	const everyone = "nats"
	if g.digest == nil {
		if g.tokenlessNATS {
			return nil, false
		}
		return refuse(http.StatusForbidden, "no admin token is configured (AEGIS_ADMIN_TOKEN), so commands over NATS are refused"),
			g.attempts.note(everyone, now)
	}
	var tokens []string
	for name, values := range header { // as it was sent: NATS headers keep their case
		if strings.EqualFold(name, tokenHeader) {
			tokens = append(tokens, values...)
		}
	}
	return g.token(everyone, tokens, now)
}

func (g *gate) token(who string, tokens []string, now time.Time) (refusal *problem, fresh bool) {
	if len(tokens) == 0 {
		// Nothing was guessed, so nothing is counted.
		return refuse(http.StatusUnauthorized, "the header %s must carry the admin token", tokenHeader), g.attempts.note(who, now)
	}
	right := false
	if len(tokens) == 1 {
		given := sha256.Sum256([]byte(tokens[0]))
		right = subtle.ConstantTimeCompare(given[:], g.digest[:]) == 1
	}
	wait, fresh := g.attempts.attempt(who, now, right)
	switch {
	case wait > 0:
		return refuse(http.StatusTooManyRequests, "too many wrong admin tokens from here; try again later").after(wait), fresh
	case !right:
		return refuse(http.StatusUnauthorized, "the admin token in %s is wrong", tokenHeader), fresh
	}
	return nil, false
}

// notLocal says what shows that a request does not come from this machine, or
// was made by a web page of another origin; "" if nothing does.
func notLocal(r *http.Request, peer netip.Addr) string {
	if !peer.IsLoopback() {
		return "this one comes from another"
	}
	for _, h := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-Ip", "Via"} {
		if r.Header.Values(h) != nil {
			return "this one was forwarded (" + h + ")"
		}
	}
	// A page whose name was made to resolve to this machine sends its own name.
	if !loopbackHost(r.Host) {
		return "the Host header must name this machine, such as 127.0.0.1 or localhost"
	}
	for _, origin := range r.Header.Values("Origin") {
		if u, err := url.Parse(origin); err != nil || !strings.EqualFold(u.Host, r.Host) {
			return "this one was made by a page of another origin"
		}
	}
	return ""
}

func loopbackHost(hostport string) bool {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		host = strings.TrimSuffix(strings.TrimPrefix(hostport, "["), "]")
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr.Unmap().IsLoopback()
	}
	return strings.EqualFold(host, "localhost")
}

// remote is the address of the socket's other end; the zero Addr, which is not
// loopback, if it is no IP socket.
func remote(r *http.Request) netip.Addr {
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	return ap.Addr().Unmap().WithZone("")
}

// network is what attempts are counted by: an IPv4 address, or the /64 that one
// IPv6 host can choose its addresses from.
func network(a netip.Addr) string {
	if a.Is6() {
		if p, err := a.Prefix(64); err == nil {
			return p.String()
		}
	}
	return a.String()
}

// Bounds on guessing: after maxFailures wrong tokens within failureWindow
// nothing more is looked at, right or wrong, until the first of them is that old.
const (
	maxFailures   = 5
	failureWindow = time.Minute
	maxCallers    = 4096
)

// attempts remembers failures by caller. When there are too many callers the one
// that tried longest ago is forgotten.
type attempts struct {
	mu     sync.Mutex
	byName map[string]*list.Element // of *guesser
	recent *list.List               // last tried first
}

type guesser struct {
	name string
	// failed are the times of the last wrong tokens, oldest first.
	failed []time.Time
	noted  time.Time
}

func newAttempts() *attempts {
	return &attempts{byName: make(map[string]*list.Element), recent: list.New()}
}

// attempt counts one try. wait is positive while the caller is locked out; then
// the try is not counted and must not be honoured even if it was right. Testing
// and counting are one step: parallel guesses get no more tries than serial ones.
func (a *attempts) attempt(name string, now time.Time, right bool) (wait time.Duration, fresh bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.guesser(name)
	for len(c.failed) > 0 && now.Sub(c.failed[0]) >= failureWindow {
		c.failed = c.failed[1:]
	}
	if len(c.failed) >= maxFailures {
		return failureWindow - now.Sub(c.failed[0]), c.note(now)
	}
	if right {
		return 0, false
	}
	c.failed = append(c.failed, now)
	c.noted = now
	return 0, true
}

// note is true at most once a minute for a caller.
func (a *attempts) note(name string, now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.guesser(name).note(now)
}

func (c *guesser) note(now time.Time) bool {
	if !c.noted.IsZero() && now.Sub(c.noted) < failureWindow {
		return false
	}
	c.noted = now
	return true
}

func (a *attempts) guesser(name string) *guesser {
	if e, ok := a.byName[name]; ok {
		a.recent.MoveToFront(e)
		return e.Value.(*guesser)
	}
	if a.recent.Len() >= maxCallers {
		last := a.recent.Back()
		delete(a.byName, last.Value.(*guesser).name)
		a.recent.Remove(last)
	}
	c := &guesser{name: name}
	a.byName[name] = a.recent.PushFront(c)
	return c
}

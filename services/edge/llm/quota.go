package llm

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"math"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/aegisrate/aegisrate/pkg/ratelimiter"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// The windows of the counters, and the names that their keys begin with.
const (
	UserWindow  = time.Minute
	ModelWindow = time.Second
	UserName    = "aegis"
	ModelName   = "aegis_model"
)

// maxCarry is how many windows a debt may reach ahead; what is beyond is forgiven.
const maxCarry = 10

// Names of the limits, as refusals tell them.
const (
	RPM = "@rpm"
	TPM = "@tpm"
	RPS = "@rps"
)

// Counters count the calls and tokens of users by the minute, and the calls of models by the second.
type Counters struct{ Users, Models ratelimiter.Counter }

// NewCounters makes both by one way to make a counter, such as redisstore's.
func NewCounters(counter func(name string, window time.Duration) (ratelimiter.Counter, error)) (Counters, error) {
	users, err := counter(UserName, UserWindow)
	if err != nil {
		return Counters{}, err
	}
	models, err := counter(ModelName, ModelWindow)
	return Counters{users, models}, err
}

// NewLocal makes an edge's own, on the clock now.
func NewLocal(now func() time.Time) Counters {
	return Counters{ratelimiter.NewMemory(UserWindow, now), ratelimiter.NewMemory(ModelWindow, now)}
}

// Limiter holds calls to their quotas, by counting first. All its fields are set before the first
// Reserve; it is safe for concurrent use.
type Limiter struct {
	// Shared are every edge's; Local are this edge's own, for when those are away. Then
	// it admits its share: one by the live edges of the fleet.
	Shared, Local Counters
	Breaker       *admission.Breaker
	Fleet         *admission.Fleet
	Now           func() time.Time

	forgiven atomic.Uint64
}

// Forgiven is how many tokens of debt were let go, since they reached too far ahead.
func (l *Limiter) Forgiven() uint64 { return l.forgiven.Load() }

// Quota is what one call is held to.
type Quota struct {
	// User is the client; RPM and TPM are its calls and tokens a minute, 0: unlimited.
	User     string
	RPM, TPM int64
	// Model is what is asked for, "" where that is unknown; RPS its calls a second, 0: unlimited.
	Model string
	RPS   int64
	// Tokens are to be reserved, at most TPM where that is set.
	Tokens int64
}

// View is the state of a limit, as clients are told of it.
type View struct {
	// Name is "" where there is no such limit.
	Name string
	// Quota comes back with each window; Remaining of it is left until the next one, in Reset.
	Quota, Remaining int64
	Reset            time.Duration
}

// left is the share of the quota that remains.
func (v View) left() float64 { return float64(v.Remaining) / float64(v.Quota) }

// Grant is the answer to a call: what it holds, or the limit that refuses it.
type Grant struct {
	// Refused is the limit in the way; "" where the call may go on.
	Refused View
	// RetryAfter is when a call like this can pass again, of a refused one.
	RetryAfter time.Duration
	// Requests is the tighter of the limits on calls, Tokens the one on tokens.
	Requests, Tokens View
	// Degraded: the shared counters gave no answer, so this edge decided alone.
	Degraded bool

	limiter  *Limiter
	counters Counters
	quota    Quota
	at       time.Time // tells the windows charged
}

// Reserve counts a call and its tokens in each of its limits, and takes all of it back where one of them
// is exceeded. What is granted must be followed by Settle or Refund, once. It never fails: while the
// shared counters are away it counts in the edge's own.
func (l *Limiter) Reserve(ctx context.Context, q Quota) Grant {
	ctx = context.WithoutCancel(ctx)            // a client that leaves must not end an increment half way
	if q.RPM == 0 && q.TPM == 0 && q.RPS == 0 { // nobody is asked
		g, _ := l.reserve(ctx, l.Local, q)
		return g
	}
	if pass := l.Breaker.Pass(); pass != admission.Refused {
		g, err := l.reserve(ctx, l.Shared, q)
		l.Breaker.Debit(pass, err == nil)
		if err == nil {
			return g
		}
		// It may have counted. That is not taken back, since it may not have; it ends with its window.
	}
	edges := l.Fleet.Live()
	share := func(quota int64) int64 {
		if quota == 0 {
			return 0
		}
		return max(1, quota/edges)
	}
	q.RPM, q.TPM, q.RPS = share(q.RPM), share(q.TPM), share(q.RPS)
	if q.TPM > 0 {
		q.Tokens = min(q.Tokens, q.TPM)
	}
	g, _ := l.reserve(ctx, l.Local, q) // memory does not fail
	g.Degraded = true
	return g
}

func (l *Limiter) reserve(ctx context.Context, c Counters, q Quota) (Grant, error) {
	at := l.Now()
	g := Grant{limiter: l, counters: c, quota: q, at: at}
	counts, err := c.Users.At(at).IncrAll(ctx, g.userCounts(1)...)
	if err != nil {
		return g, err
	}
	if q.RPM > 0 {
		g.Requests = view(RPM, q.RPM, counts[0], at, UserWindow)
	}
	if q.TPM > 0 {
		g.Tokens = view(TPM, q.TPM, counts[len(counts)-1], at, UserWindow)
	}
	overCalls, overTokens := q.RPM > 0 && counts[0] > q.RPM, q.TPM > 0 && counts[len(counts)-1] > q.TPM
	if overCalls || overTokens {
		if back, err := c.Users.At(at).IncrAll(ctx, g.userCounts(-1)...); err == nil {
			counts = back
		}
		if overCalls {
			g.refuse(g.Requests)
		} else {
			g.refuse(g.Tokens)
			g.wait(q.Tokens, counts[len(counts)-1])
		}
		return g, nil
	}
	if q.RPS == 0 {
		return g, nil
	}
	// Models are counted once the user's own limits have passed: a user that is over them must
	// not stand in the way of others for as long as its call is being taken back.
	n, err := c.Models.At(at).Incr(ctx, modelKey(q.Model), 1)
	if err != nil {
		return g, err
	}
	v := view(RPS, q.RPS, n, at, ModelWindow)
	if n > q.RPS {
		// What can't be taken back ends with its window.
		_, _ = c.Models.At(at).Incr(ctx, modelKey(q.Model), -1)
		_, _ = c.Users.At(at).IncrAll(ctx, g.userCounts(-1)...)
		g.Requests = v
		g.refuse(v)
		return g, nil
	}
	if g.Requests.Name == "" || v.left() < g.Requests.left() {
		g.Requests = v
	}
	return g, nil
}

// userCounts are what the call adds to its user's counters, times sign.
func (g *Grant) userCounts(sign int64) []ratelimiter.Count {
	counts := make([]ratelimiter.Count, 0, 2)
	if g.quota.RPM > 0 {
		counts = append(counts, ratelimiter.Count{Key: rpmKey(g.quota.User), Val: sign})
	}
	if g.quota.TPM > 0 {
		counts = append(counts, ratelimiter.Count{Key: tpmKey(g.quota.User), Val: sign * g.quota.Tokens})
	}
	return counts
}

// view is a limit whose counter in the window of at stands at n.
func view(name string, quota, n int64, at time.Time, window time.Duration) View {
	return View{Name: name, Quota: quota, Remaining: max(0, quota-n), Reset: untilNext(at, window)}
}

// untilNext is the time from at to the next window.
func untilNext(at time.Time, window time.Duration) time.Duration {
	begin := at.Unix() - at.Unix()%int64(window/time.Second)
	return time.Unix(begin, 0).Add(window).Sub(at)
}

// refuse says that v is in the way of the call.
func (g *Grant) refuse(v View) { g.Refused, g.RetryAfter = v, v.Reset }

// wait reckons when cost tokens fit again where the counter stands at n without them: each window
// takes one quota off what stands above it.
func (g *Grant) wait(cost, n int64) {
	quota := g.quota.TPM
	windows := min(max(1, (n+cost-1)/quota), maxCarry) // ⌈(n + cost − quota) / quota⌉
	g.RetryAfter += time.Duration(windows-1) * UserWindow
	g.Refused.Remaining, g.Refused.Reset = max(0, quota-n), g.RetryAfter
	g.Tokens = g.Refused
}

// Reserved is how many tokens the call holds: 0 where nothing limits them.
func (g *Grant) Reserved() int64 {
	if g.quota.TPM == 0 {
		return 0
	}
	return g.quota.Tokens
}

// Settle puts what the call really used in the place of what it reserved. What is left over goes back
// to the window that was charged. What it used beyond is charged to the window that is
// current now, since the charged one may have ended, and its counter with it.
//
// After an error it may or may not have been done.
func (g *Grant) Settle(ctx context.Context, used int64) error {
	if g.quota.TPM == 0 {
		return nil
	}
	at := g.at
	if used > g.quota.Tokens {
		at = g.limiter.Now()
	}
	return g.limiter.move(ctx, g.counters.Users, tpmKey(g.quota.User), at, used-g.quota.Tokens, g.quota.TPM)
}

// Refund takes the whole call back: it never reached the upstream.
func (g *Grant) Refund(ctx context.Context) error {
	err := g.Settle(ctx, 0)
	if g.quota.RPM > 0 {
		_, e := g.counters.Users.At(g.at).Incr(ctx, rpmKey(g.quota.User), -1)
		err = errors.Join(err, e)
	}
	if g.quota.RPS > 0 {
		_, e := g.counters.Models.At(g.at).Incr(ctx, modelKey(g.quota.Model), -1)
		err = errors.Join(err, e)
	}
	return err
}

// move adds delta tokens to a counter in the window of at. What stands above the limit is debt, and debt
// blocks until it is repaid: each following window begins with what the one before it could
// not hold. Every change moves just what it adds to that, or takes from it, so the
// changes of many calls add up whatever their order.
func (l *Limiter) move(ctx context.Context, c ratelimiter.Counter, key string, at time.Time, delta, limit int64) error {
	for range maxCarry {
		if delta == 0 {
			return nil
		}
		after, err := c.At(at).Incr(ctx, key, delta)
		if err != nil {
			return err
		}
		if after == 0 {
			return nil // nothing stood above the limit, or the window is gone
		}
		before := after - delta
		delta = max(0, after-limit) - max(0, before-limit)
		at = at.Add(UserWindow)
	}
	l.forgiven.Add(uint64(max(0, delta)))
	return nil
}

func rpmKey(user string) string { return user + "_RPM_CURRENT" }

func tpmKey(user string) string { return user + "_TPM_CURRENT" }

// modelKey is bounded and distinct for any name: clients choose it.
func modelKey(model string) string {
	const longest = 64
	name := url.QueryEscape(model)
	if len(name) > longest {
		sum := sha256.Sum256([]byte(model))
		name = "~" + base64.RawURLEncoding.EncodeToString(sum[:])
	}
	return name + "_MODEL_RPS_CURRENT"
}

// Seconds rounds up to whole seconds, 1 at the least.
func Seconds(d time.Duration) int64 { return max(1, int64(math.Ceil(d.Seconds()))) }

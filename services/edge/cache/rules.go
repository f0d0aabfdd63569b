package cache

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pquerna/cachecontrol/cacheobject"
)

// heuristic bounds the freshness that is guessed from Last-Modified (RFC 9111, 4.2.2).
const heuristic = 24 * time.Hour

// rules are how long an answer may be given out.
type rules struct {
	fresh time.Duration
	// revalidate forbids every use of it once it is stale.
	revalidate bool
	// staleIfError bounds that use; negative: the upstream says nothing.
	staleIfError time.Duration
}

// storable are the final statuses that may be stored without a word on their freshness (RFC 9110, 15.1), but for
// 206, 405, 414 and 501, which say nothing of the resource.
var storable = []int{
	http.StatusOK, http.StatusNonAuthoritativeInfo, http.StatusNoContent, http.StatusMultipleChoices,
	http.StatusMovedPermanently, http.StatusPermanentRedirect, http.StatusNotFound, http.StatusGone,
}

// storableRequest reports whether any answer to r may be stored.
func storableRequest(r Request) bool {
	if r.Method != http.MethodGet || r.Header.Get("Range") != "" {
		return false
	}
	cc, err := requestDirectives(r.Header)
	return err == nil && !cc.NoStore
}

// rulesOf says whether a shared cache may store the answer of status and header h, which came at now (RFC 9111, 3).
func rulesOf(r Request, status int, h http.Header, now time.Time) (rules, bool) {
	cc, err := cacheobject.ParseResponseCacheControl(strings.Join(h.Values("Cache-Control"), ", "))
	switch {
	case err != nil, cc.NoStore, cc.PrivatePresent, cc.NoCachePresent,
		!slices.Contains(storable, status),
		len(h.Values("Set-Cookie")) > 0,
		strings.HasPrefix(h.Get("Content-Type"), "text/event-stream"):
		return rules{}, false
	case r.Header.Get("Authorization") != "" && !cc.Public && !cc.MustRevalidate && cc.SMaxAge < 0: // 3.5
		return rules{}, false
	}
	made := rules{
		fresh:        freshness(cc, h, now),
		revalidate:   cc.MustRevalidate || cc.ProxyRevalidate || cc.SMaxAge >= 0,
		staleIfError: seconds(cc.StaleIfError),
	}
	return made, true
}

// freshness is the lifetime that the upstream gives its answer, or that its last change suggests.
func freshness(cc *cacheobject.ResponseCacheDirectives, h http.Header, now time.Time) time.Duration {
	date, err := http.ParseTime(h.Get("Date"))
	if err != nil {
		date = now
	}
	lines := strings.ToLower(strings.Join(h.Values("Cache-Control"), ", "))
	switch {
	case strings.Count(lines, "max-age=") > 1, strings.Count(lines, "s-maxage=") > 1, len(h.Values("Expires")) > 1:
		return 0 // 4.2.1: what is said twice makes it stale
	case cc.SMaxAge >= 0:
		return seconds(cc.SMaxAge)
	case cc.MaxAge >= 0:
		return seconds(cc.MaxAge)
	case len(h.Values("Expires")) > 0:
		expires, err := http.ParseTime(h.Get("Expires"))
		if err != nil { // "0" above all: it has expired
			return 0
		}
		return max(0, expires.Sub(date))
	}
	if modified, err := http.ParseTime(h.Get("Last-Modified")); err == nil {
		return min(max(0, date.Sub(modified)/10), heuristic)
	}
	return 0
}

// ageOf is how old an answer was when its head came, delay after it was asked for (RFC 9111, 4.2.3).
func ageOf(h http.Header, now time.Time, delay time.Duration) time.Duration {
	age := delay
	if n, err := strconv.ParseUint(strings.TrimSpace(h.Get("Age")), 10, 31); err == nil {
		age += time.Duration(n) * time.Second
	}
	if date, err := http.ParseTime(h.Get("Date")); err == nil {
		age = max(age, now.Sub(date))
	}
	return age
}

// allow reports whether an answer of this age may be given to a request of header h.
func (r rules) allow(h http.Header, age, maxStale time.Duration) bool {
	cc, err := requestDirectives(h)
	if err != nil || cc.NoCache || cc.NoStore {
		return false
	}
	if cc.MaxAge >= 0 && age > seconds(cc.MaxAge) || cc.MinFresh >= 0 && r.fresh-age < seconds(cc.MinFresh) {
		return false
	}
	stale := age - r.fresh
	if stale <= 0 {
		return true
	}
	limited := cc.MaxStale >= 0 // max-stale with a number; MaxStaleSet is the one without
	if r.revalidate || cc.MaxAge >= 0 && !limited && !cc.MaxStaleSet {
		return false
	}
	if r.staleIfError >= 0 {
		maxStale = min(maxStale, r.staleIfError)
	}
	if limited {
		maxStale = min(maxStale, seconds(cc.MaxStale))
	}
	return stale <= maxStale
}

func requestDirectives(h http.Header) (*cacheobject.RequestCacheDirectives, error) {
	value := strings.Join(h.Values("Cache-Control"), ", ")
	if value == "" && strings.Contains(strings.ToLower(h.Get("Pragma")), "no-cache") {
		value = "no-cache"
	}
	return cacheobject.ParseRequestCacheControl(value)
}

// seconds keeps -1, the word for a directive that is not there, negative.
func seconds(d cacheobject.DeltaSeconds) time.Duration { return time.Duration(d) * time.Second }

const maxVary = 16

// rewritten are prefixes of request headers that upstreams see otherwise than clients send them: an answer
// that varies by one can't be selected by what a client sent.
var rewritten = []string{"X-Forwarded-", "Forwarded", "X-Real-Ip", "X-Request-Id", "X-Edge-", "Host"}

// varyOf is which request headers select the answer, in canonical form and order; false where that can't be told.
func varyOf(h http.Header) ([]string, bool) {
	var names []string
	for _, line := range h.Values("Vary") {
		for name := range strings.SplitSeq(line, ",") {
			name = http.CanonicalHeaderKey(strings.TrimSpace(name))
			if name == "" || slices.Contains(names, name) {
				continue
			}
			if name == "*" || slices.ContainsFunc(rewritten, func(p string) bool { return strings.HasPrefix(name, p) }) {
				return nil, false
			}
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, len(names) <= maxVary
}

package cache_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/services/edge/cache"
)

// rig is a cache whose clock the test moves.
type rig struct {
	*cache.Cache
	now time.Time
}

func newRig(maxBytes int64) *rig {
	r := &rig{now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
	r.Cache = cache.New(maxBytes, func() time.Time { return r.now })
	return r
}

func (r *rig) wait(d time.Duration) { r.now = r.now.Add(d) }

// fields are header lines, "Name: value".
func fields(lines ...string) http.Header {
	h := http.Header{}
	for _, l := range lines {
		name, value, _ := strings.Cut(l, ": ")
		h.Add(name, value)
	}
	return h
}

func get(uri string, lines ...string) cache.Request {
	return cache.Request{Method: http.MethodGet, Host: "h", URI: uri, Upstream: "up", Header: fields(lines...)}
}

// pass lets an answer pass by.
func (r *rig) pass(req cache.Request, status int, body string, lines ...string) {
	rec := r.Begin(req)
	rec.Head(status, fields(lines...))
	rec.Write([]byte(body))
	rec.End(true)
}

func (r *rig) body(req cache.Request) string {
	a, _, ok := r.Get(req, time.Hour)
	if !ok {
		return ""
	}
	return string(a.Body)
}

// What a shared cache may store (RFC 9111, 3), and what it may give out after a time (4.2).
func TestRules(t *testing.T) {
	t.Parallel()
	date := "Date: Sun, 01 Mar 2026 12:00:00 GMT"
	for name, c := range map[string]struct {
		status   int
		answer   []string
		request  []string
		later    []string // the request that asks for it
		after    time.Duration
		maxStale time.Duration
		want     bool
	}{
		"plain":                         {want: true},
		"fresh":                         {answer: []string{"Cache-Control: max-age=60"}, after: time.Minute, want: true},
		"stale":                         {answer: []string{"Cache-Control: max-age=60"}, after: 2 * time.Minute, maxStale: time.Minute, want: true},
		"too stale":                     {answer: []string{"Cache-Control: max-age=60"}, after: 2*time.Minute + time.Second, maxStale: time.Minute},
		"no-store":                      {answer: []string{"Cache-Control: max-age=60, no-store"}},
		"NO-STORE":                      {answer: []string{"Cache-Control: NO-STORE"}},
		"no-store on a line of its own": {answer: []string{"Cache-Control: max-age=60", "Cache-Control: no-store"}},
		"private":                       {answer: []string{"Cache-Control: private, max-age=60"}},
		"private field":                 {answer: []string{`Cache-Control: max-age=60, private="x-user"`}},
		"no-cache":                      {answer: []string{"Cache-Control: no-cache"}},
		"unreadable":                    {answer: []string{"Cache-Control: max-age=soon"}},
		"cookie":                        {answer: []string{"Cache-Control: public, max-age=60", "Set-Cookie: a=b"}},
		"events":                        {answer: []string{"Content-Type: text/event-stream"}},
		"partial":                       {status: 206, answer: []string{"Cache-Control: max-age=60"}},
		"error":                         {status: 500, answer: []string{"Cache-Control: max-age=60"}},
		"redirect":                      {status: 302, answer: []string{"Cache-Control: max-age=60"}},
		"gone":                          {status: 410, want: true},
		"asked not to store":            {request: []string{"Cache-Control: no-store"}},
		"range":                         {request: []string{"Range: bytes=0-1"}},
		"authorized":                    {request: []string{"Authorization: x"}, later: []string{"Authorization: x"}, answer: []string{"Cache-Control: max-age=60"}},
		"authorized, public":            {request: []string{"Authorization: x"}, later: []string{"Authorization: x"}, answer: []string{"Cache-Control: public"}, want: true},
		"authorized, s-maxage":          {request: []string{"Authorization: x"}, later: []string{"Authorization: x"}, answer: []string{"Cache-Control: s-maxage=60"}, want: true},
		"s-maxage counts":               {answer: []string{"Cache-Control: s-maxage=60, max-age=1"}, after: time.Minute, want: true},
		"s-maxage, stale":               {answer: []string{"Cache-Control: s-maxage=60"}, after: 61 * time.Second, maxStale: time.Hour},
		"must-revalidate, fresh":        {answer: []string{"Cache-Control: max-age=60, must-revalidate"}, after: time.Minute, want: true},
		"must-revalidate, stale":        {answer: []string{"Cache-Control: max-age=60, must-revalidate"}, after: 61 * time.Second, maxStale: time.Hour},
		"proxy-revalidate, stale":       {answer: []string{"Cache-Control: max-age=60, proxy-revalidate"}, after: 61 * time.Second, maxStale: time.Hour},
		"stale-if-error":                {answer: []string{"Cache-Control: max-age=60, stale-if-error=30"}, after: 90 * time.Second, maxStale: time.Hour, want: true},
		"beyond stale-if-error":         {answer: []string{"Cache-Control: max-age=60, stale-if-error=30"}, after: 91 * time.Second, maxStale: time.Hour},
		"max-age twice":                 {answer: []string{"Cache-Control: max-age=60, max-age=3600"}, after: time.Second},
		"Expires":                       {answer: []string{date, "Expires: Sun, 01 Mar 2026 12:01:00 GMT"}, after: time.Minute, want: true},
		"Expires, stale":                {answer: []string{date, "Expires: Sun, 01 Mar 2026 12:01:00 GMT"}, after: 61 * time.Second},
		"Expires 0":                     {answer: []string{"Expires: 0"}, after: time.Second},
		"max-age over Expires":          {answer: []string{date, "Expires: Sun, 01 Mar 2026 12:01:00 GMT", "Cache-Control: max-age=1"}, after: 2 * time.Second},
		"heuristic":                     {answer: []string{date, "Last-Modified: Sun, 01 Mar 2026 11:00:00 GMT"}, after: 6 * time.Minute, want: true},
		"heuristic, stale":              {answer: []string{date, "Last-Modified: Sun, 01 Mar 2026 11:00:00 GMT"}, after: 6*time.Minute + time.Second},
		"aged on its way":               {answer: []string{"Cache-Control: max-age=60", "Age: 30"}, after: 31 * time.Second},
		"old by its date":               {answer: []string{"Cache-Control: max-age=60", "Date: Sun, 01 Mar 2026 11:59:30 GMT"}, after: 31 * time.Second},
		"client wants it fresh":         {answer: []string{"Cache-Control: max-age=60"}, later: []string{"Cache-Control: no-cache"}},
		"client wants it fresh, old":    {answer: []string{"Cache-Control: max-age=60"}, later: []string{"Pragma: no-cache"}},
		"client's max-age":              {answer: []string{"Cache-Control: max-age=60"}, later: []string{"Cache-Control: max-age=5"}, after: 5 * time.Second, want: true},
		"above the client's max-age":    {answer: []string{"Cache-Control: max-age=60"}, later: []string{"Cache-Control: max-age=5"}, after: 6 * time.Second},
		"client's max-age, stale":       {answer: []string{"Cache-Control: max-age=1"}, later: []string{"Cache-Control: max-age=5"}, after: 2 * time.Second, maxStale: time.Hour},
		"client's max-stale":            {answer: []string{"Cache-Control: max-age=1"}, later: []string{"Cache-Control: max-stale=5"}, after: 6 * time.Second, maxStale: time.Hour, want: true},
		"above the client's max-stale":  {answer: []string{"Cache-Control: max-age=1"}, later: []string{"Cache-Control: max-stale=5"}, after: 7 * time.Second, maxStale: time.Hour},
		"client's min-fresh":            {answer: []string{"Cache-Control: max-age=60"}, later: []string{"Cache-Control: min-fresh=30"}, after: 31 * time.Second},
		"varies":                        {answer: []string{"Vary: Accept"}, request: []string{"Accept: a"}, later: []string{"Accept: a"}, want: true},
		"varies, another":               {answer: []string{"Vary: accept"}, request: []string{"Accept: a"}, later: []string{"Accept: b"}},
		"varies, none":                  {answer: []string{"Vary: X-A, Accept"}, request: []string{"Accept: a"}},
		"varies by everything":          {answer: []string{"Vary: Accept, *"}},
		"varies by what is rewritten":   {answer: []string{"Vary: X-Forwarded-For"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(1 << 20)
			if c.status == 0 {
				c.status = 200
			}
			r.pass(get("/a", c.request...), c.status, "body", c.answer...)
			r.wait(c.after)
			if _, age, ok := r.Get(get("/a", c.later...), c.maxStale); ok != c.want {
				t.Errorf("given out: %v, age %v", ok, age)
			}
		})
	}
}

func TestAge(t *testing.T) {
	t.Parallel()
	r := newRig(1 << 20)
	rec := r.Begin(get("/a"))
	r.wait(2 * time.Second)
	rec.Head(200, fields("Age: 10", "Cache-Control: max-age=60", "ETag: x"))
	r.wait(time.Second) // the body takes its time
	rec.Write([]byte("b"))
	rec.End(true)
	r.wait(5 * time.Second)
	a, age, ok := r.Get(get("/a"), 0)
	if !ok || age != 18*time.Second || a.Status != 200 || a.Header.Get("ETag") != "x" || a.Header.Get("Age") != "" {
		t.Errorf("%+v, %v, %v", a, age, ok)
	}
	if head := get("/a"); true {
		head.Method = http.MethodHead
		if _, _, ok := r.Get(head, 0); !ok {
			t.Error("a HEAD is not answered by the GET's answer")
		}
		head.Method = http.MethodPost
		if _, _, ok := r.Get(head, 0); ok {
			t.Error("a POST is answered by the GET's answer")
		}
	}
}

// One client's answer is never another's, whatever its credentials look like.
func TestCredentialsKeepAnswersApart(t *testing.T) {
	t.Parallel()
	requests := []cache.Request{
		get("/a"),
		get("/a", "Authorization: x"), get("/a", "Authorization: y"),
		get("/a", "Cookie: x"), get("/a", "Cookie: y"), get("/a", "Cookie: x", "Cookie: y"), get("/a", "Cookie: x, y"),
		get("/a", "X-API-Key: x"), get("/a", "X-API-Key: y"), get("/a", "Proxy-Authorization: x"),
		get("/a", "Cookie: x", "X-API-Key: y"), get("/a", "Cookie: y", "X-API-Key: x"),
		get("/b"), get("/a?x"),
	}
	for _, change := range []func(*cache.Request){
		func(r *cache.Request) { r.Host = "other" }, func(r *cache.Request) { r.Upstream = "other" }, func(r *cache.Request) { r.Client = "user:a" },
		func(r *cache.Request) { r.Client = "user:b" },
	} {
		r := get("/a")
		change(&r)
		requests = append(requests, r)
	}
	for i, stored := range requests {
		r := newRig(1 << 20)
		r.pass(stored, 200, "body", "Cache-Control: public")
		for j, asking := range requests {
			if got := r.body(asking) != ""; got != (i == j) {
				t.Errorf("answer to %+v given to %+v: %v", stored, asking, got)
			}
		}
	}
}

func TestInvalidate(t *testing.T) {
	t.Parallel()
	r := newRig(1 << 20)
	r.pass(get("/a", "Cookie: x"), 200, "x", "Vary: Accept")
	r.pass(get("/a"), 200, "plain", "Vary: Accept")
	r.pass(get("/b"), 200, "other")
	late := r.Begin(get("/a")) // it was sent on before the change
	late.Head(200, fields("Vary: Accept"))
	late.Write([]byte("late"))
	r.Invalidate("H", "/a")
	late.End(true)
	if r.body(get("/a")) != "" || r.body(get("/a", "Cookie: x")) != "" {
		t.Error("an answer outlived the change of its resource")
	}
	if r.body(get("/b")) != "other" {
		t.Error("another resource was forgotten")
	}
	r.pass(get("/a"), 200, "new")
	if r.body(get("/a")) != "new" {
		t.Error("nothing is stored after an invalidation")
	}
}

// The newest answer counts, also where it varies by something else than the one before.
func TestNewAnswersReplaceOld(t *testing.T) {
	t.Parallel()
	r := newRig(1 << 20)
	r.pass(get("/a", "Accept: x"), 200, "old")
	r.pass(get("/a", "Accept: x"), 200, "new")
	if got := r.body(get("/a", "Accept: y")); got != "new" {
		t.Errorf("%q", got)
	}
	r.pass(get("/a", "Accept: x"), 200, "varies", "Vary: Accept")
	if x, y := r.body(get("/a", "Accept: x")), r.body(get("/a", "Accept: y")); x != "varies" || y != "" {
		t.Errorf("%q, %q", x, y)
	}
}

func TestIncompleteAnswersAreNotStored(t *testing.T) {
	t.Parallel()
	r := newRig(1 << 20)
	rec := r.Begin(get("/a"))
	rec.Head(200, fields())
	rec.Write([]byte("bo"))
	rec.End(false)
	r.Begin(get("/a")).End(true) // not even a head
	if r.body(get("/a")) != "" {
		t.Error("half an answer was stored")
	}
}

// Stored answers, and those on their way into the cache, keep within the bound.
func TestBound(t *testing.T) {
	t.Parallel()
	const bound = 4 << 20
	r := newRig(bound)
	body := strings.Repeat("x", 64<<10)
	for i := range 400 {
		r.pass(get(fmt.Sprintf("/%d", i)), 200, body)
	}
	deadline := time.Now().Add(10 * time.Second)
	for r.Bytes() > bound && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond) // entries are dropped behind the caller's back
	}
	if n := r.Bytes(); n > bound || n < bound/4 {
		t.Errorf("%d bytes are stored, the bound is %d", n, bound)
	}
	r.pass(get("/large"), 200, strings.Repeat("x", cache.MaxBody+1))
	if r.body(get("/large")) != "" {
		t.Error("a body beyond the bound of one was stored")
	}
	// So many unfinished answers can't be held.
	var open []*cache.Recording
	for i := range 2 * bound / (512 << 10) {
		rec := r.Begin(get(fmt.Sprintf("/open/%d", i)))
		rec.Head(200, fields())
		rec.Write(make([]byte, 512<<10))
		open = append(open, rec)
	}
	for _, rec := range open {
		rec.End(true)
	}
	kept := 0
	for i := range open {
		if r.body(get(fmt.Sprintf("/open/%d", i))) != "" {
			kept++
		}
	}
	if kept > bound/(512<<10) {
		t.Errorf("%d answers of half a MiB were held at once", kept)
	}
	off := newRig(0)
	off.pass(get("/a"), 200, "body")
	if off.body(get("/a")) != "" {
		t.Error("a cache of no bytes stores")
	}
}

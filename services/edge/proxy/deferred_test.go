package proxy_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/services/edge/deferral"
)

// later stores what is deferred in memory, and runs nothing.
type later struct {
	mu        sync.Mutex
	offers    []deferral.Offer
	fail      error
	status    map[string]deferral.Status // by client and id
	cancelled []string
}

func (l *later) Add(_ context.Context, o deferral.Offer) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fail != nil {
		return "", l.fail
	}
	l.offers = append(l.offers, o)
	return fmt.Sprintf("ID%d", len(l.offers)), nil
}

func (l *later) Get(_ context.Context, client, id string) (deferral.Status, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s, ok := l.status[client+" "+id]; ok {
		return s, nil
	}
	return deferral.Status{}, deferral.ErrNotFound
}

func (l *later) Cancel(_ context.Context, client, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cancelled = append(l.cancelled, client+" "+id)
	return l.fail
}

func (l *later) set(id string, s deferral.Status) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.status == nil {
		l.status = make(map[string]deferral.Status)
	}
	l.status[id] = s
}

// exhausted is a rig whose client has nothing but grace left.
func exhausted(t *testing.T, up http.HandlerFunc, more ...string) *rig {
	t.Helper()
	more = append([]string{"capacity: 5", "refill_rate: 0.001"}, more...)
	r := newRig(t, rigConfig{policy: policyFor(upstream(t, up), more...)})
	for range 5 {
		r.get("/api", "X-API-Key", "alice")
		r.event()
	}
	return r
}

// A yellow request is stored as it came, and only then answered 202.
func TestYellowIsStored(t *testing.T) {
	t.Parallel()
	r := exhausted(t, func(http.ResponseWriter, *http.Request) {})
	req := r.request(http.MethodPut, "/api//x%2Fy?a=%20b&c", strings.NewReader("body"),
		"X-API-Key", "alice", "Authorization", "Basic x", "Idempotency-Key", "k1", "Accept", "a", "Accept", "b")
	req.Host = "api.example.com"
	res, body := r.do(req)
	if res.StatusCode != 202 || res.Header.Get("Location") != "/_aegis/deferred/ID1" || res.Header.Get("Retry-After") == "" ||
		res.Header.Get("X-Graceful-Degradation") != "Deferred" || !strings.Contains(body, `"state":"queued"`) {
		t.Errorf("%s %v %s", res.Status, res.Header, body)
	}
	if len(r.later.offers) != 1 {
		t.Fatalf("%d requests are stored", len(r.later.offers))
	}
	o := r.later.offers[0]
	if o.Client != "user:alice" || o.Route != "api" || o.Key != "k1" || o.Request.Method != "PUT" || o.Request.Host != "api.example.com" ||
		o.Request.URI != "/api//x%2Fy?a=%20b&c" || string(o.Request.Body) != "body" || len(o.Request.Header["Accept"]) != 2 ||
		o.Request.Header["Authorization"][0] != "Basic x" || o.Request.ID != res.Header.Get("X-Request-Id") || !strings.HasPrefix(o.Request.Peer, "127.0.0.1:") {
		t.Errorf("%+v", o)
	}
	r.noEvent()
}

// What can't run later is refused: 202 is never said of it.
func TestWhatIsNotDeferred(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		method, body string
		header       []string
		fail         error
		status       int
		says         string
	}{
		"POST":       {http.MethodPost, "", nil, nil, 429, "POST requests don't run later"},
		"upgrade":    {http.MethodGet, "", []string{"Connection", "upgrade", "Upgrade", "x"}, nil, 429, "can't run later"},
		"queue full": {http.MethodGet, "", nil, deferral.ErrFull, 429, "too many requests wait"},
		"no NATS":    {http.MethodGet, "", nil, deferral.ErrUnavailable, 429, "can't be stored"},
		"key reused": {http.MethodGet, "", nil, deferral.ErrKeyReused, 422, "another request"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := exhausted(t, func(http.ResponseWriter, *http.Request) {})
			r.later.fail = c.fail
			res, body := r.do(r.request(c.method, "/api", strings.NewReader(c.body), append(c.header, "X-API-Key", "alice")...))
			p := problemOf(t, res, body, c.status)
			if !strings.Contains(p.Detail, c.says) || c.status == 429 && (res.Header.Get("Retry-After") == "" || p.Tier != "yellow") ||
				res.Header.Get("Location") != "" || res.Header.Get("X-Graceful-Degradation") != "" || len(r.later.offers) > 0 {
				t.Errorf("%v %+v, %d stored", res.Header, p, len(r.later.offers))
			}
		})
	}
	t.Run("POST, opted in", func(t *testing.T) {
		t.Parallel()
		r := exhausted(t, func(http.ResponseWriter, *http.Request) {}, "defer_methods: [POST]")
		if res, body := r.do(r.request(http.MethodPost, "/api", strings.NewReader("x"), "X-API-Key", "alice")); res.StatusCode != 202 {
			t.Errorf("%s %s", res.Status, body)
		}
	})
	t.Run("degrade: off", func(t *testing.T) {
		t.Parallel()
		r := exhausted(t, func(http.ResponseWriter, *http.Request) {}, "degrade: off")
		res, body := r.get("/api", "X-API-Key", "alice")
		if p := problemOf(t, res, body, 429); p.Tier != "red" {
			t.Errorf("%+v", p)
		}
	})
}

// A body that declares more than is stored is not waited for.
func TestLargeBodyIsNotDeferred(t *testing.T) {
	t.Parallel()
	r := exhausted(t, func(http.ResponseWriter, *http.Request) {})
	conn := r.raw(fmt.Sprintf("PUT /api HTTP/1.1\r\nHost: h\r\nX-API-Key: alice\r\nContent-Length: %d\r\n\r\n", deferral.MaxBody+1))
	conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	answer, err := io.ReadAll(conn)
	for _, want := range []string{"HTTP/1.1 429 ", "Retry-After: ", "too large", `"tier":"yellow"`} {
		if err != nil || !strings.Contains(string(answer), want) || len(r.later.offers) > 0 {
			t.Errorf("%v %q without %q, %d stored", err, answer, want, len(r.later.offers))
		}
	}
}

// A body that stalls is not waited for long, and not stored.
func TestStalledBodyIsNotDeferred(t *testing.T) {
	t.Parallel()
	r := exhausted(t, func(http.ResponseWriter, *http.Request) {})
	conn := r.raw("PUT /api HTTP/1.1\r\nHost: h\r\nX-API-Key: alice\r\nContent-Length: 10\r\n\r\nhalf")
	conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	answer, err := io.ReadAll(conn)
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 429 ") || len(r.later.offers) > 0 {
		t.Errorf("%v %q, %d stored", err, answer, len(r.later.offers))
	}
}

// At its Location a deferred request tells its owner, and nobody else, what has become of it.
func TestDeferredAtItsLocation(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigConfig{policy: policyFor("http://127.0.0.1:1", "capacity: 5", "refill_rate: 1")})
	const path = "/_aegis/deferred/"
	alice := []string{"X-API-Key", "alice"}
	r.later.set("user:alice WAITS", deferral.Status{Route: "api", State: events.DeferralQueued})
	r.later.set("user:alice RUNS", deferral.Status{Route: "api", State: events.DeferralRunning})
	r.later.set("user:alice DONE", deferral.Status{Route: "api", State: events.DeferralDone, Answer: &deferral.Answer{
		Status: 201, Header: http.Header{"X-Theirs": {"1"}, "Cache-Control": {"public"}, "Content-Type": {"text/plain"}}, Body: []byte("made"),
	}})
	r.later.set("user:alice LOST", deferral.Status{Route: "api", State: events.DeferralFailed, Reason: "it may have run"})
	r.later.set("user:alice GONE", deferral.Status{Route: "api", State: events.DeferralCancelled})

	for id, state := range map[string]string{"WAITS": "queued", "RUNS": "running"} {
		res, body := r.get(path+id, alice...)
		if res.StatusCode != 202 || !strings.Contains(body, `"state":"`+state+`"`) || res.Header.Get("Retry-After") != "1" {
			t.Errorf("%s: %s %v %s", id, res.Status, res.Header, body)
		}
	}
	res, body := r.get(path+"DONE", alice...)
	if res.StatusCode != 201 || body != "made" || res.Header.Get("X-Theirs") != "1" || res.Header.Get("Cache-Control") != "private, no-store" ||
		res.Header.Get("X-Graceful-Degradation") != "Deferred" {
		t.Errorf("%s %v %q", res.Status, res.Header, body)
	}
	if res, body := r.do(r.request(http.MethodHead, path+"DONE", nil, alice...)); res.StatusCode != 201 || body != "" {
		t.Errorf("HEAD: %s %q", res.Status, body)
	}
	res, body = r.get(path+"LOST", alice...)
	if p := problemOf(t, res, body, 502); p.Detail != "it may have run" {
		t.Errorf("%+v", p)
	}
	res, body = r.get(path+"GONE", alice...)
	problemOf(t, res, body, 410)
	for _, others := range [][]string{nil, {"X-API-Key", "nobody"}, {"X-API-Key", "root"}} {
		res, body = r.get(path+"DONE", others...)
		problemOf(t, res, body, 404)
	}
	if res, _ := r.do(r.request(http.MethodDelete, path+"WAITS", nil, alice...)); res.StatusCode != 204 || len(r.later.cancelled) != 1 || r.later.cancelled[0] != "user:alice WAITS" {
		t.Errorf("%s, cancelled: %q", res.Status, r.later.cancelled)
	}
	for err, status := range map[error]int{deferral.ErrTooLate: 409, deferral.ErrNotFound: 404, deferral.ErrUnavailable: 503} {
		r.later.fail = err
		res, body := r.do(r.request(http.MethodDelete, path+"RUNS", nil, alice...))
		problemOf(t, res, body, status)
	}
	if res, _ := r.do(r.request(http.MethodPost, path+"WAITS", nil, alice...)); res.StatusCode != 405 || res.Header.Get("Allow") == "" {
		t.Errorf("POST: %s", res.Status)
	}
	// Questions are bounded; the rig's store clock goes on, so that some of them may be answered.
	refused := 0
	for range 60 {
		if res, _ := r.get(path+"DONE", alice...); res.StatusCode == 429 && res.Header.Get("Retry-After") == "1" {
			refused++
		}
	}
	if refused == 0 {
		t.Error("questions without end are all answered")
	}
	if res, _ := r.get(path+"NONE", "X-API-Key", "root"); res.StatusCode != 404 {
		t.Errorf("another client's question: %s", res.Status)
	}
}

// A deferred run is a request like any other: decided, charged in full, forwarded, counted.
func TestDeferredRun(t *testing.T) {
	t.Parallel()
	got := make(chan *http.Request, 1)
	r := newRig(t, rigConfig{policy: policyFor(upstream(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		got <- r
		w.Header().Set("X-Theirs", "1")
		w.WriteHeader(201)
		io.WriteString(w, "made")
	}), "capacity: 5", "refill_rate: 1")})
	stored := deferral.Request{
		ID: "R1", Method: "PUT", Host: "api.example.com", URI: "/api//x%2Fy?a=%20b&c", Body: []byte("body"), Peer: "192.0.2.9:4321",
		Header: http.Header{"X-Api-Key": {"alice"}, "Accept": {"a", "b"}},
	}
	p, err := r.handler.Foresee(t.Context(), "user:alice", stored)
	if err != nil || p.Wait != 0 || p.Each != time.Second {
		t.Errorf("%+v, %v", p, err)
	}
	a, again, err := r.handler.Run(t.Context(), "user:alice", stored)
	if err != nil || again != 0 || a.Status != 201 || string(a.Body) != "made" || http.Header(a.Header).Get("X-Theirs") != "1" {
		t.Fatalf("%+v, %v, %v", a, again, err)
	}
	up := <-got
	body, _ := io.ReadAll(up.Body)
	if up.Method != "PUT" || up.RequestURI != "/api//x%2Fy?a=%20b&c" || up.Host != "api.example.com" || string(body) != "body" ||
		len(up.Header["Accept"]) != 2 || up.Header.Get("X-Forwarded-For") != "192.0.2.9" || up.Header.Get("X-Request-Id") != "R1" || up.Header.Get("X-Api-Key") != "" {
		t.Errorf("%s %s %s %v %q", up.Method, up.RequestURI, up.Host, up.Header, body)
	}
	e := r.event()
	if e.Client != "user:alice" || e.Outcome != events.OutcomeOK || len(e.Charges) != 1 || e.Charges[0].Amount != 1_000_000 || e.ID != "R1" {
		t.Errorf("%+v", e)
	}

	// Who is not its client any more does not run it; nor does anyone when it is not its turn.
	if _, _, err := r.handler.Run(t.Context(), "user:bob", stored); err == nil {
		t.Error("run for another client")
	}
	if _, err := r.handler.Foresee(t.Context(), "user:bob", stored); err == nil {
		t.Error("foreseen for another client")
	}
	r.noEvent()
	for range 4 {
		r.get("/api", "X-API-Key", "alice")
		r.event()
	}
	if p, err := r.handler.Foresee(t.Context(), "user:alice", stored); err != nil || p.Wait <= 0 {
		t.Errorf("exhausted: %+v, %v", p, err)
	}
	if _, again, err := r.handler.Run(t.Context(), "user:alice", stored); again < time.Second || err != nil {
		t.Errorf("exhausted: %v, %v", again, err)
	}
	r.noEvent()
}

func TestDeferredRunFails(t *testing.T) {
	t.Parallel()
	began := make(chan struct{}, 1)
	r := newRig(t, rigConfig{policy: policyFor(upstream(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/api/large":
			w.Write(make([]byte, deferral.MaxBody+1))
		case "/api/reset":
			w.Write(make([]byte, 100_000))
			panic(http.ErrAbortHandler)
		case "/api/wait":
			began <- struct{}{}
			<-r.Context().Done()
		}
	}), "capacity: 50", "refill_rate: 1")})
	run := func(ctx context.Context, uri string) (deferral.Answer, error) {
		a, _, err := r.handler.Run(ctx, "ip:192.0.2.9", deferral.Request{ID: "R", Method: "GET", Host: "h", URI: uri, Peer: "192.0.2.9:1"})
		return a, err
	}
	if _, err := run(t.Context(), "/api/large"); err == nil || !strings.Contains(err.Error(), "not kept") {
		t.Errorf("large: %v", err)
	}
	if _, err := run(t.Context(), "/api/reset"); err == nil || !strings.Contains(err.Error(), "broke off") {
		t.Errorf("reset: %v", err)
	}
	if _, err := run(t.Context(), "/nowhere"); err == nil || !strings.Contains(err.Error(), "no route") {
		t.Errorf("no route: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	if _, err := run(ctx, "/api/wait"); !errors.Is(err, deferral.ErrInterrupted) {
		t.Errorf("the edge stops: %v", err)
	}
	r.use(policyFor("http://127.0.0.1:1", "capacity: 50", "refill_rate: 1"))
	if a, err := run(t.Context(), "/api"); err != nil || a.Status != 502 {
		t.Errorf("unreachable: %d, %v", a.Status, err)
	}
}

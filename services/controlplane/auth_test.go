package controlplane

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func withToken() *gate {
	digest := sha256.Sum256([]byte("right"))
	return &gate{digest: &digest, attempts: newAttempts()}
}

func request(peer, host string, header ...string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "http://"+host+"/api/config", nil)
	r.RemoteAddr = peer
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	return r
}

func statusOf(p *problem) int {
	if p == nil {
		return http.StatusOK
	}
	return p.Status
}

func TestTokenIsNeededFromEverywhere(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		tokens []string
		want   int
	}{
		"right":         {[]string{"right"}, 200},
		"none":          {nil, 401},
		"empty":         {[]string{""}, 401},
		"wrong":         {[]string{"wrong"}, 401},
		"prefix":        {[]string{"righ"}, 401},
		"longer":        {[]string{"right "}, 401},
		"right twice":   {[]string{"right", "right"}, 401},
		"right or else": {[]string{"wrong", "right"}, 401},
	} {
		for _, peer := range []string{"127.0.0.1:1", "[::1]:1", "192.0.2.1:1"} {
			r := request(peer, "127.0.0.1:8090")
			r.Header[tokenHeader] = c.tokens
			if _, refusal, _ := withToken().http(r, time.Now()); statusOf(refusal) != c.want {
				t.Errorf("%s from %s: %d, want %d", name, peer, statusOf(refusal), c.want)
			}
		}
	}
}

func TestWithoutTokenOnlyThisMachineIsServed(t *testing.T) {
	t.Parallel()
	const here = "127.0.0.1:4711"
	for name, c := range map[string]struct {
		r    *http.Request
		want int
	}{
		"curl":                 {request(here, "127.0.0.1:8090"), 200},
		"by name":              {request(here, "localhost:8090"), 200},
		"by name, no port":     {request(here, "LOCALHOST"), 200},
		"ipv6":                 {request("[::1]:4711", "[::1]:8090"), 200},
		"ipv6, no port":        {request("[::1]:4711", "[::1]"), 200},
		"mapped":               {request("[::ffff:127.0.0.1]:4711", "127.0.0.2:8090"), 200},
		"own page":             {request(here, "localhost:8090", "Origin", "http://localhost:8090"), 200},
		"other machine":        {request("192.0.2.7:4711", "127.0.0.1:8090"), 403},
		"private network":      {request("172.17.0.1:4711", "127.0.0.1:8090"), 403},
		"no socket address":    {request("@", "127.0.0.1:8090"), 403},
		"proxied":              {request(here, "127.0.0.1:8090", "X-Forwarded-For", "127.0.0.1"), 403},
		"proxied, empty":       {request(here, "127.0.0.1:8090", "X-Forwarded-For", ""), 403},
		"proxied, RFC 7239":    {request(here, "127.0.0.1:8090", "Forwarded", "for=127.0.0.1"), 403},
		"proxied, via":         {request(here, "127.0.0.1:8090", "Via", "1.1 x"), 403},
		"DNS rebinding":        {request(here, "attacker.example:8090"), 403},
		"rebinding, lookalike": {request(here, "localhost.attacker.example"), 403},
		"rebinding, digits":    {request(here, "127.0.0.1.attacker.example"), 403},
		"foreign page":         {request(here, "localhost:8090", "Origin", "http://attacker.example"), 403},
		"page at another port": {request(here, "localhost:8090", "Origin", "http://localhost:3000"), 403},
		"page from a file":     {request(here, "localhost:8090", "Origin", "null"), 403},
		"two origins":          {request(here, "localhost:8090", "Origin", "http://localhost:8090", "Origin", "http://x"), 403},
	} {
		g := &gate{attempts: newAttempts()}
		if _, refusal, _ := g.http(c.r, time.Now()); statusOf(refusal) != c.want {
			t.Errorf("%s: %d, want %d", name, statusOf(refusal), c.want)
		}
	}
}

func TestNATSWithoutToken(t *testing.T) {
	t.Parallel()
	g := &gate{attempts: newAttempts()}
	if refusal, _ := g.nats(map[string][]string{tokenHeader: {"any"}}, time.Now()); statusOf(refusal) != 403 {
		t.Errorf("without a token: %d, want 403", statusOf(refusal))
	}
	g.tokenlessNATS = true
	if refusal, _ := g.nats(nil, time.Now()); refusal != nil {
		t.Errorf("allowed without a token: %v", refusal)
	}
	g = withToken()
	g.tokenlessNATS = true
	if refusal, _ := g.nats(nil, time.Now()); statusOf(refusal) != 401 {
		t.Errorf("a token is configured, but none was needed: %d", statusOf(refusal))
	}
	if refusal, _ := g.nats(map[string][]string{"x-admin-token": {"right"}}, time.Now()); refusal != nil {
		t.Errorf("right token in lower case: %v", refusal)
	}
}

func TestGuessingLocksOut(t *testing.T) {
	t.Parallel()
	g, now := withToken(), time.Now()
	try := func(peer, token string, at time.Time) (*problem, bool) {
		_, refusal, fresh := g.http(request(peer, "h", tokenHeader, token), at)
		return refusal, fresh
	}
	for i := range maxFailures {
		if p, fresh := try("192.0.2.1:1", "wrong", now.Add(time.Duration(i)*time.Second)); statusOf(p) != 401 || !fresh {
			t.Fatalf("guess %d: %d, audited %v", i, statusOf(p), fresh)
		}
	}
	at := now.Add(30 * time.Second)
	for _, token := range []string{"wrong", "right"} {
		p, fresh := try("192.0.2.1:9", token, at)
		if statusOf(p) != 429 || p.RetryAfter != 30 || fresh {
			t.Errorf("%s token while locked out: %+v, audited %v", token, p, fresh)
		}
	}
	if p, _ := try("192.0.2.2:1", "right", at); p != nil {
		t.Errorf("another address is locked out too: %v", p)
	}
	// What was refused while locked out does not prolong it.
	if p, _ := try("192.0.2.1:1", "right", now.Add(failureWindow)); p != nil {
		t.Errorf("after a minute: %v", p)
	}
	// The first failure is forgotten then, the other four are not.
	if p, _ := try("192.0.2.1:1", "wrong", now.Add(failureWindow)); statusOf(p) != 401 {
		t.Errorf("one more guess: %d", statusOf(p))
	}
	if p, _ := try("192.0.2.1:1", "right", now.Add(failureWindow)); statusOf(p) != 429 {
		t.Errorf("five failures within the last minute: %d, want 429", statusOf(p))
	}
}

func TestGuessingFromOneIPv6Network(t *testing.T) {
	t.Parallel()
	g, now := withToken(), time.Now()
	for i := range maxFailures + 1 {
		_, p, _ := g.http(request(fmt.Sprintf("[2001:db8:1:2::%x]:1", i+1), "h", tokenHeader, "wrong"), now)
		if want := map[bool]int{true: 401, false: 429}[i < maxFailures]; statusOf(p) != want {
			t.Errorf("address %d: %d, want %d", i, statusOf(p), want)
		}
	}
	if _, p, _ := g.http(request("[2001:db8:1:3::1]:1", "h", tokenHeader, "right"), now); p != nil {
		t.Errorf("another network: %v", p)
	}
}

// Parallel guesses get no more tries than serial ones.
func TestGuessingInParallel(t *testing.T) {
	t.Parallel()
	g, now := withToken(), time.Now()
	var looked atomic.Int32
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			token := "wrong"
			if i == 150 {
				token = "right"
			}
			if _, p, _ := g.http(request("192.0.2.1:1", "h", tokenHeader, token), now); statusOf(p) == 401 {
				looked.Add(1)
			}
		})
	}
	wg.Wait()
	if n := looked.Load(); n != maxFailures {
		t.Errorf("%d guesses were looked at, want %d", n, maxFailures)
	}
}

// A caller without a token guesses nothing: it is told each time, and audited once a minute.
func TestMissingTokenIsNotCounted(t *testing.T) {
	t.Parallel()
	g, now := withToken(), time.Now()
	audited := 0
	for range 100 {
		_, p, fresh := g.http(request("192.0.2.1:1", "h"), now)
		if statusOf(p) != 401 {
			t.Fatalf("got %d", statusOf(p))
		}
		if fresh {
			audited++
		}
	}
	if audited != 1 {
		t.Errorf("audited %d times, want once", audited)
	}
	if _, p, _ := g.http(request("192.0.2.1:1", "h", tokenHeader, "right"), now); p != nil {
		t.Errorf("right token: %v", p)
	}
	if _, _, fresh := g.http(request("192.0.2.1:1", "h"), now.Add(failureWindow)); !fresh {
		t.Error("a minute later it is not audited again")
	}
}

func TestAttemptsAreBounded(t *testing.T) {
	t.Parallel()
	a, now := newAttempts(), time.Now()
	for i := range maxCallers + 100 {
		a.attempt(fmt.Sprint(i), now, false)
		a.attempt("0", now, false) // stays: it is the one that goes on trying
	}
	if len(a.byName) != maxCallers || a.recent.Len() != maxCallers {
		t.Errorf("%d and %d callers are remembered, want %d", len(a.byName), a.recent.Len(), maxCallers)
	}
	if wait, _ := a.attempt("0", now, true); wait <= 0 {
		t.Error("the most active guesser was forgotten")
	}
}

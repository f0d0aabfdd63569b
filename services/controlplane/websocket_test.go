package controlplane

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
)

// socketTo opens the WebSocket with these headers.
func socketTo(t *testing.T, p *plane, header ...string) (*websocket.Conn, *http.Response) {
	t.Helper()
	h := http.Header{}
	host := ""
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			host = header[i+1]
		} else {
			h.Set(header[i], header[i+1])
		}
	}
	c, resp, err := websocket.Dial(t.Context(), "ws://"+p.Addr()+"/api/ws", &websocket.DialOptions{HTTPHeader: h, Host: host})
	if resp == nil {
		t.Fatal(err)
	}
	if c != nil {
		t.Cleanup(func() { c.CloseNow() })
	}
	return c, resp
}

func say(t *testing.T, c *websocket.Conn, message string) socketReply {
	t.Helper()
	if err := c.Write(t.Context(), websocket.MessageText, []byte(message)); err != nil {
		t.Fatal(err)
	}
	_, data, err := c.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var r socketReply
	if err := json.Unmarshal(data, &r); err != nil {
		t.Fatalf("%v: %s", err, data)
	}
	return r
}

func TestSetConfigOverWebSocket(t *testing.T) {
	t.Parallel()
	p := startPlane(t, bustest.Start(t))
	c, _ := socketTo(t, p, "Origin", "http://"+p.Addr())
	if r := say(t, c, `{"type":"AUTH","token":"`+token+`"}`); r.Type != "AUTHENTICATED" {
		t.Fatalf("%+v", r)
	}
	if r := say(t, c, `{"type":"SET_CONFIG","id":"a","config":{"shadow_mode":true},"dry_run":true}`); r.Type != "CONFIG" || r.ID != "a" || !r.Reply.DryRun || r.Reply.Version != 1 {
		t.Errorf("%+v", r)
	}
	if r := say(t, c, `{"type":"SET_CONFIG","id":"b","config":{"shadow_mode":true},"if_match":"1","actor":"ann"}`); r.Type != "CONFIG" || r.Reply.Version != 2 {
		t.Errorf("%+v", r)
	}
	if v, doc := p.config(t); v.Via != "websocket" || v.Actor != "ann" || !doc.ShadowMode {
		t.Errorf("%+v", v)
	}
	if r := say(t, c, `{"type":"SET_CONFIG","config":{"routes":{"fast":{"capacity":0}}}}`); r.Type != "ERROR" || r.Problem.Status != 400 || r.Problem.Errors[0].Path != "routes.fast.capacity" {
		t.Errorf("%+v", r)
	}
	if r := say(t, c, `{"type":"SET_CONFIG","config":{},"if_match":"1"}`); r.Problem == nil || r.Problem.Status != 409 || r.Problem.Version != 2 {
		t.Errorf("%+v", r)
	}
	for _, bad := range []string{`{`, `{"type":"DROP"}`, `{"typ":"AUTH"}`} {
		if r := say(t, c, bad); r.Problem == nil || r.Problem.Status != 400 {
			t.Errorf("%s: %+v", bad, r)
		}
	}
	// A client that is no browser says the token at once.
	plain, _ := socketTo(t, p, tokenHeader, token)
	if r := say(t, plain, `{"type":"SET_CONFIG","config":{"shadow_mode":false}}`); r.Type != "CONFIG" || r.Reply.Version != 3 {
		t.Errorf("%+v", r)
	}
	if c, resp := socketTo(t, p, tokenHeader, "wrong"); c != nil || resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("with a wrong token: %d", resp.StatusCode)
	}
}

// TestWebSocketCSRF: a page of another origin, or one whose name was made to resolve to this machine, gets
// no socket, token or not; and a socket without the token changes nothing.
func TestWebSocketCSRF(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	for _, withToken := range []bool{true, false} {
		p := startPlane(t, server, func(c *Config) {
			c.Origins, c.Hosts = []string{"https://admin.example.com"}, []string{"admin.example.com"}
			if !withToken {
				c.AdminToken = ""
			}
		})
		for _, evil := range [][]string{
			{"Origin", "https://evil.example"},
			{"Origin", "null"},
			{"Origin", "http://" + p.Addr() + ".evil.example"},
			{"Origin", "https://admin.example.com.evil.example", "Host", "admin.example.com"},
			{"Origin", "http://rebound.example", "Host", "rebound.example"}, // DNS rebinding
			{"Origin", "file://"},
		} {
			if withToken {
				evil = append(evil, tokenHeader, token)
			}
			if c, resp := socketTo(t, p, evil...); c != nil || resp.StatusCode != http.StatusForbidden {
				t.Errorf("%v: %d", evil, resp.StatusCode)
			}
		}
		if withToken {
			if c, resp := socketTo(t, p, "Origin", "https://admin.example.com", "Host", "admin.example.com", tokenHeader, token); c == nil {
				t.Errorf("a page that is allowed: %d", resp.StatusCode)
			}
			c, _ := socketTo(t, p, "Origin", "http://"+p.Addr())
			if r := say(t, c, `{"type":"SET_CONFIG","config":{"shadow_mode":true}}`); r.Problem == nil || r.Problem.Status != http.StatusUnauthorized {
				t.Errorf("without the token: %+v", r)
			}
			if _, _, err := c.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusPolicyViolation {
				t.Errorf("after that: %v", err)
			}
		}
		// Over plain HTTP a foreign page can send a form or text, but no JSON.
		for _, kind := range []string{"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"} {
			if a := p.do(t, "POST", "/api/control", `{"shadow_mode":true}`, "Content-Type", kind, "Origin", "https://evil.example"); a.status < 400 {
				t.Errorf("%s: %d", kind, a.status)
			}
		}
		if v, _ := p.config(t); v.Version != 1 {
			t.Errorf("version %d", v.Version)
		}
	}
}

// TestTokenBruteForce: five wrong tokens a minute from one address, by whichever way in, and then not even
// the right one; the failures are audited.
func TestTokenBruteForce(t *testing.T) {
	t.Parallel()
	p := startPlane(t, bustest.Start(t))
	for i := range maxFailures {
		if i%2 == 0 {
			if _, resp := socketTo(t, p, tokenHeader, "guess"); resp.StatusCode != http.StatusUnauthorized {
				t.Errorf("guess %d: %d", i, resp.StatusCode)
			}
			continue
		}
		if a := p.do(t, "GET", "/api/users", "", tokenHeader, "guess"); a.status != http.StatusUnauthorized {
			t.Errorf("guess %d: %d", i, a.status)
		}
	}
	for _, guess := range []string{"another", token} {
		a := p.do(t, "GET", "/api/config", "", tokenHeader, guess)
		if a.status != http.StatusTooManyRequests || a.header.Get("Retry-After") == "" {
			t.Errorf("%s: %d", guess, a.status)
		}
		if _, resp := socketTo(t, p, tokenHeader, guess); resp.StatusCode != http.StatusTooManyRequests {
			t.Errorf("%s by the WebSocket: %d", guess, resp.StatusCode)
		}
	}
	c, _ := socketTo(t, p)
	if r := say(t, c, `{"type":"AUTH","token":"`+token+`"}`); r.Problem == nil || r.Problem.Status != http.StatusTooManyRequests {
		t.Errorf("%+v", r)
	}
	bustest.Await(t, "the audit", func() bool { return strings.Contains(p.log.String(), `"result":"unauthenticated"`) })
}

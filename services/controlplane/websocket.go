package controlplane

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// viaWebSocket is how changes by the WebSocket are attributed.
const viaWebSocket = "websocket"

// authTimeout bounds how long a socket may stay without having shown the token, pingEvery and
// socketTimeout how long a peer that is gone stays unnoticed.
const (
	authTimeout   = 10 * time.Second
	pingEvery     = 20 * time.Second
	socketTimeout = 10 * time.Second
)

// socketMessage is what a page sends.
//
//	{"type": "AUTH", "token": "..."}                 first of all, where the upgrade had no X-Admin-Token
//	{"type": "SET_CONFIG", "id": "1", "config": {...}, "if_match": "7", "dry_run": true}
//
// SET_CONFIG's config is the body of POST /api/control.
type socketMessage struct {
	Type    string          `json:"type"`
	ID      string          `json:"id"`
	Token   string          `json:"token"`
	Config  json.RawMessage `json:"config"`
	IfMatch string          `json:"if_match"`
	DryRun  bool            `json:"dry_run"`
	Actor   string          `json:"actor"`
	Reason  string          `json:"reason"`
}

// socketReply answers a message: "AUTHENTICATED", "CONFIG" or "ERROR".
type socketReply struct {
	Type    string              `json:"type"`
	ID      string              `json:"id,omitempty"`
	Reply   *events.ConfigReply `json:"reply,omitempty"`
	Problem *problem            `json:"problem,omitempty"`
}

// serveWebSocket takes changes from pages. Browsers send a foreign page's upgrade like any other, and ask
// nobody first: so the origin must be one that is known, and the token comes in a header or a message,
// never in a cookie or a URL.
func (s *Service) serveWebSocket(w http.ResponseWriter, r *http.Request) {
	peer := remote(r).String()
	if reason := s.foreign(r); reason != "" {
		refusal := refuse(http.StatusForbidden, "%s", reason)
		s.turnedAway(peer, viaWebSocket, actionChange, refusal, s.gate.attempts.note(network(remote(r)), time.Now()))
		answer(w, refusal)
		return
	}
	authenticated := false
	if s.gate.digest == nil || r.Header.Get(tokenHeader) != "" {
		_, refusal, fresh := s.gate.http(r, time.Now())
		if refusal != nil {
			s.turnedAway(peer, viaWebSocket, actionChange, refusal, fresh)
			answer(w, refusal)
			return
		}
		authenticated = true
	}
	rc := http.NewResponseController(w)
	if rc.SetReadDeadline(time.Time{}) != nil || rc.SetWriteDeadline(time.Time{}) != nil {
		answer(w, refuse(http.StatusInternalServerError, "this connection takes no deadlines"))
		return
	}
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true}) // foreign has verified it
	if err != nil {
		return // it has answered
	}
	defer conn.CloseNow()
	conn.SetReadLimit(policy.MaxDocument)
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go s.keepAlive(ctx, conn)
	s.converse(ctx, conn, r, authenticated)
}

// keepAlive pings until ctx ends, and ends the connection when nothing comes back.
func (s *Service) keepAlive(ctx context.Context, conn *websocket.Conn) {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		ping, cancel := context.WithTimeout(ctx, socketTimeout)
		err := conn.Ping(ping)
		cancel()
		if err != nil {
			conn.CloseNow()
			return
		}
	}
}

// converse answers messages until the peer leaves.
func (s *Service) converse(ctx context.Context, conn *websocket.Conn, r *http.Request, authenticated bool) {
	for {
		wait, cancel := ctx, context.CancelFunc(func() {})
		if !authenticated {
			wait, cancel = context.WithTimeout(ctx, authTimeout)
		}
		_, data, err := conn.Read(wait)
		cancel()
		if err != nil {
			return
		}
		reply := s.socket(ctx, r, data, &authenticated)
		if reply.Problem != nil && !authenticated {
			_ = s.say(ctx, conn, reply) // whether it hears why or not, it is not let in
			conn.Close(websocket.StatusPolicyViolation, "not authenticated")
			return
		}
		if s.say(ctx, conn, reply) != nil {
			return
		}
	}
}

func (s *Service) say(ctx context.Context, conn *websocket.Conn, reply socketReply) error {
	ctx, cancel := context.WithTimeout(ctx, socketTimeout)
	defer cancel()
	return conn.Write(ctx, websocket.MessageText, toJSON(reply))
}

// socket answers one message.
func (s *Service) socket(ctx context.Context, r *http.Request, data []byte, authenticated *bool) socketReply {
	var m socketMessage
	d := json.NewDecoder(strings.NewReader(string(data)))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		return socketReply{Type: "ERROR", Problem: refuse(http.StatusBadRequest, "not a message: %v", err)}
	}
	refused := func(p *problem) socketReply { return socketReply{Type: "ERROR", ID: m.ID, Problem: p} }
	if !*authenticated || m.Type == "AUTH" {
		var given []string
		if m.Token != "" {
			given = []string{m.Token}
		}
		if s.gate.digest != nil {
			if refusal, fresh := s.gate.token(network(remote(r)), given, time.Now()); refusal != nil {
				s.turnedAway(remote(r).String(), viaWebSocket, actionChange, refusal, fresh)
				*authenticated = false
				return refused(refusal)
			}
		}
		*authenticated = true
		if m.Type == "AUTH" {
			return socketReply{Type: "AUTHENTICATED", ID: m.ID}
		}
	}
	if m.Type != "SET_CONFIG" {
		return refused(refuse(http.StatusBadRequest, "type must be AUTH or SET_CONFIG"))
	}
	reply, refusal := s.change(ctx, change{
		caller: caller{by: remote(r).String(), via: viaWebSocket, actor: oneLine(m.Actor), reason: oneLine(m.Reason)},
		edit:   patch(m.Config), ifMatch: m.IfMatch, dryRun: m.DryRun,
	})
	if refusal != nil {
		return refused(refusal)
	}
	return socketReply{Type: "CONFIG", ID: m.ID, Reply: &reply}
}

// foreign says why an upgrade is not from a page that may make it, or "". A client that is no browser sends
// no Origin. The Host is checked for pages too: a page whose name was made to resolve to this machine
// (DNS rebinding) has that name as both.
func (s *Service) foreign(r *http.Request) string {
	origins := r.Header.Values("Origin")
	if len(origins) == 0 {
		return ""
	}
	if !loopbackHost(r.Host) && !slices.Contains(s.cfg.Hosts, strings.ToLower(r.Host)) {
		return "the Host header is not a name of this API; add it to AEGIS_CONTROLPLANE_HOSTS"
	}
	if len(origins) > 1 {
		return "a page has one origin"
	}
	if slices.Contains(s.cfg.Origins, origins[0]) {
		return ""
	}
	if u, err := url.Parse(origins[0]); err != nil || !strings.EqualFold(u.Host, r.Host) || (u.Scheme != "http" && u.Scheme != "https") {
		return "this upgrade was made by a page of another origin; add it to AEGIS_CONTROLPLANE_ORIGINS"
	}
	return ""
}

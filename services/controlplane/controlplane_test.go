package controlplane

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/google/go-cmp/cmp"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

func TestDefaultConfigIsThatOfTheFlags(t *testing.T) {
	t.Parallel()
	var cfg Config
	parser, err := kong.New(&cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parser.Parse(nil); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(DefaultConfig(), cfg); diff != "" {
		t.Errorf("(-DefaultConfig +flags)\n%s", diff)
	}
}

func TestNewRefusesWhatCannotWork(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	for name, c := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"no address":   {func(c *Config) { c.Addr = "" }, "addr"},
		"two tokens":   {func(c *Config) { c.AdminToken, c.AdminTokenFile = "a", "b" }, "one of them"},
		"no file":      {func(c *Config) { c.AdminTokenFile = filepath.Join(dir, "gone") }, "admin-token-file"},
		"empty file":   {func(c *Config) { c.AdminTokenFile = write("token", "\n") }, "is empty"},
		"no policy":    {func(c *Config) { c.PolicyFile = filepath.Join(dir, "gone") }, "policy-file"},
		"bad policy":   {func(c *Config) { c.PolicyFile = write("policy", "routes:\n  r: {path: x}\n") }, "routes.r.path (line 2)"},
		"negative":     {func(c *Config) { c.DrainTimeout = -1 }, "drain-timeout"},
		"empty policy": {func(c *Config) { c.PolicyFile = write("empty", "") }, "empty"},
	} {
		cfg := DefaultConfig()
		c.change(&cfg)
		if _, err := New(cfg, Deps{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
}

func TestTokenFromAFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token+"\r\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := startPlane(t, bustest.Start(t), func(c *Config) { c.AdminToken, c.AdminTokenFile = "", file })
	if a := p.do(t, http.MethodGet, "/api/config", ""); a.status != http.StatusOK {
		t.Errorf("right token: %d %s", a.status, a.body)
	}
	if a := p.do(t, http.MethodGet, "/api/config", "", tokenHeader, token+"x"); a.status != http.StatusUnauthorized {
		t.Errorf("wrong token: %d", a.status)
	}
}

func TestPolicyFileBecomesVersionOne(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	v, doc := p.config(t)
	if v.Version != 1 || v.Via != "file" || v.By != "controlplane" || v.Time.IsZero() {
		t.Errorf("version is %d by %q via %q at %v", v.Version, v.By, v.Via, v.Time)
	}
	want, err := policy.Parse(policy.Example())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, doc); diff != "" {
		t.Errorf("(-file +config)\n%s", diff)
	}
	// A later start, even with another file, finds the stream filled.
	p.post(t, `{"shadow_mode": true}`)
	second := startPlane(t, server)
	if v, doc := second.config(t); v.Version != 2 || !doc.ShadowMode {
		t.Errorf("the second controlplane has version %d, shadow mode %v", v.Version, doc.ShadowMode)
	}
	if n := len(versionsIn(t, server.Bus(t))); n != 2 {
		t.Errorf("the stream has %d versions, want 2", n)
	}
}

func TestReplicasStartingAtOnceImportOnce(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	file := examplePolicy(t)
	planes := make([]*plane, 4)
	for i := range planes {
		planes[i] = newPlane(t, server.Bus(t), func(c *Config) { c.PolicyFile = file })
	}
	for _, p := range planes {
		p.awaitReady(t)
		if v, _ := p.config(t); v.Version != 1 {
			t.Errorf("version is %d, want 1", v.Version)
		}
	}
	if n := len(versionsIn(t, server.Bus(t))); n != 1 {
		t.Errorf("the stream has %d versions, want 1", n)
	}
}

func TestChange(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	a := p.do(t, http.MethodPost, "/api/control",
		`{"algorithm": "sliding_window", "routes": {"fast": {"capacity": 50, "refill_rate": 12.5}, "slow": {"shadow_mode": true}}}`)
	if a.status != http.StatusOK || a.header.Get("ETag") != `"2"` || a.header.Get("Cache-Control") != "no-store" {
		t.Errorf("got %d %v", a.status, a.header)
	}
	want := events.ConfigReply{Version: 2, Changed: []string{"algorithm", "routes.fast.capacity", "routes.fast.refill_rate", "routes.slow.shadow_mode"}}
	got := decodeJSON[events.ConfigReply](t, []byte(a.body))
	for i, d := range got.Diff {
		if i >= len(want.Changed) || d.Path != want.Changed[i] {
			t.Errorf("the differences are %v", got.Diff)
		}
	}
	got.Diff = nil
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("reply (-want +got)\n%s", diff)
	}
	// In force at once for who asks here, and as it is in the stream.
	v, doc := p.config(t)
	if v.Version != 2 || v.By != "127.0.0.1" || v.Via != "http" {
		t.Errorf("version is %d by %q via %q", v.Version, v.By, v.Via)
	}
	if r := doc.Routes["fast"]; doc.Algorithm != bucket.SlidingWindow || r.Capacity != 50 || r.RefillRate != 12.5 || r.SlidingLimit != 20 {
		t.Errorf("the document has algorithm %s, fast %+v", doc.Algorithm, r)
	}
	all := versionsIn(t, server.Bus(t))
	if len(all) != 2 || all[1].Version != 2 || !bytes.Equal(all[1].Document, v.Document) {
		t.Errorf("the stream has %d versions, the last is %s", len(all), all[len(all)-1].Document)
	}
}

// Case 31: saying what is so already makes no version, however often.
func TestNoOpMakesNoVersion(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	p.post(t, `{"routes": {"fast": {"capacity": 7}}}`)
	for i := range 100 {
		patch := []string{`{}`, `{"shadow_mode": false}`, `{"routes": {"fast": {"capacity": 7, "refill_rate": 10.0}}}`}[i%3]
		a := p.do(t, http.MethodPost, "/api/control", patch)
		if a.status != http.StatusOK || strings.TrimSpace(a.body) != `{"version":2,"changed":[],"diff":[]}` {
			t.Fatalf("%s: %d %s", patch, a.status, a.body)
		}
	}
	if n := len(versionsIn(t, server.Bus(t))); n != 2 {
		t.Errorf("the stream has %d versions, want 2", n)
	}
}

// Case 32: a bad change is refused by path, and nothing moves.
func TestBadChangeMovesNothing(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	before, _ := p.config(t)
	for name, c := range map[string]struct {
		body, path string
		status     int
	}{
		"no JSON":           {`shadow_mode: true`, "", 400},
		"blank":             {" ", "", 400},
		"trailing":          {`{} x`, "", 400},
		"unknown key":       {`{"bogus": 1}`, "bogus", 400},
		"not changeable":    {`{"upstreams": {"sample": {"url": "http://evil"}}}`, "upstreams", 400},
		"duplicate":         {`{"shadow_mode": true, "shadow_mode": false}`, "shadow_mode", 400},
		"duplicate route":   {`{"routes": {"fast": {}, "fast": {}}}`, "routes.fast", 400},
		"NaN":               {`{"routes": {"fast": {"capacity": NaN}}}`, "routes.fast.capacity", 400},
		"infinite":          {`{"routes": {"fast": {"refill_rate": 1e309}}}`, "routes.fast.refill_rate", 400},
		"zero":              {`{"routes": {"fast": {"capacity": 0}}}`, "routes.fast.capacity", 400},
		"negative":          {`{"routes": {"fast": {"capacity": -3}}}`, "routes.fast.capacity", 400},
		"unknown route":     {`{"routes": {"nope": {"capacity": 3}}}`, "routes.nope", 400},
		"good beside bad":   {`{"shadow_mode": true, "routes": {"fast": {"capacity": 3, "sliding_limit": 0}}}`, "routes.fast.sliding_limit", 400},
		"unknown algorithm": {`{"algorithm": "leaky_bucket"}`, "algorithm", 400},
		"deep":              {strings.Repeat(`{"routes":`, 5000) + "1" + strings.Repeat("}", 5000), "", 400},
		"too large":         {`{"routes": "` + strings.Repeat("x", policy.MaxDocument) + `"}`, "", 413},
	} {
		a := p.do(t, http.MethodPost, "/api/control", c.body)
		got := a.problem(t)
		if a.status != c.status || got.Status != c.status || got.Title == "" || got.Detail == "" {
			t.Errorf("%s: %d %.300s, want %d", name, a.status, a.body, c.status)
		}
		if c.path != "" && (len(got.Errors) == 0 || got.Errors[0].Path != c.path || got.Errors[0].Problem == "") {
			t.Errorf("%s: errors %v, want one at %q", name, got.Errors, c.path)
		}
	}
	after, _ := p.config(t)
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("the config moved (-before +after)\n%s", diff)
	}
	if n := len(versionsIn(t, server.Bus(t))); n != 1 {
		t.Errorf("the stream has %d versions, want 1", n)
	}
}

func TestHTTPManners(t *testing.T) {
	t.Parallel()
	p := startPlane(t, bustest.Start(t))
	for _, c := range []struct {
		method, path, body string
		header             []string
		want               int
	}{
		{"GET", "/", "", nil, 404},
		{"GET", "/api/config/", "", nil, 404},
		{"GET", "/api/control", "", nil, 405},
		{"POST", "/api/config", "{}", nil, 405},
		{"DELETE", "/api/status", "", nil, 405},
		{"OPTIONS", "/api/control", "", []string{"Origin", "http://evil", "Access-Control-Request-Method", "POST"}, 405},
		{"GET", "/api/config", "", []string{tokenHeader, ""}, 401},
		{"POST", "/api/control", "{}", []string{tokenHeader, ""}, 401},
		{"GET", "/api/status", "", []string{tokenHeader, ""}, 401},
		{"HEAD", "/api/config", "", nil, 200},
		{"POST", "/api/control", "{}", []string{"Content-Type", ""}, 415},
		{"POST", "/api/control", "{}", []string{"Content-Type", "text/plain"}, 415},
		{"POST", "/api/control", "{}", []string{"Content-Type", "application/x-www-form-urlencoded"}, 415},
		{"POST", "/api/control", "{}", []string{"Content-Type", "application/json; charset=utf-8"}, 200},
		{"GET", "/api/config", "", []string{"If-None-Match", `"1"`}, 304},
		{"GET", "/api/config", "", []string{"X-Big", strings.Repeat("x", 64<<10)}, 431},
	} {
		a := p.do(t, c.method, c.path, c.body, c.header...)
		if a.status != c.want {
			t.Errorf("%s %s %.60v: %d %s, want %d", c.method, c.path, c.header, a.status, a.body, c.want)
		}
		if a.status == 405 && a.header.Get("Allow") == "" || a.header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s %s: headers %v", c.method, c.path, a.header)
		}
		if a.status >= 400 && a.status != 431 && c.method != "HEAD" {
			a.problem(t)
		}
	}
	if a := p.do(t, "PUT", "/api/control", "{}"); a.header.Get("Allow") != "POST" {
		t.Errorf("Allow is %q, want POST", a.header.Get("Allow"))
	}
	if a := p.do(t, "DELETE", "/api/config", ""); a.header.Get("Allow") != "GET, HEAD, PUT" {
		t.Errorf("Allow is %q, want GET, HEAD, PUT", a.header.Get("Allow"))
	}
}

func TestGuessingOverHTTP(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	for i := range maxFailures {
		if a := p.do(t, "GET", "/api/config", "", tokenHeader, fmt.Sprint("guess", i)); a.status != 401 {
			t.Fatalf("guess %d: %d", i, a.status)
		}
	}
	for range 20 {
		a := p.do(t, "POST", "/api/control", `{"shadow_mode": true}`)
		after, err := strconv.Atoi(a.header.Get("Retry-After"))
		if a.status != 429 || err != nil || after < 1 || after > 60 || a.problem(t).RetryAfter != int64(after) {
			t.Fatalf("while locked out: %d, Retry-After %q", a.status, a.header.Get("Retry-After"))
		}
	}
	// Each guess is audited, a flood of refusals is not, and no token appears anywhere.
	var audits []events.Audit
	b := server.Bus(t)
	bustest.Await(t, "audit events", func() bool {
		audits = stored(t, b, events.StreamAudit, events.Decode[events.Audit])
		return len(audits) >= maxFailures
	})
	if len(audits) != maxFailures {
		t.Errorf("%d audit events, want %d: %v", len(audits), maxFailures, audits)
	}
	for _, a := range audits {
		if a.Result != "unauthenticated" || a.By != "127.0.0.1" || a.Via != "http" || a.Action != "config.read" || a.Time.IsZero() {
			t.Errorf("audit event %+v", a)
		}
	}
	everything := p.log.String() + fmt.Sprint(audits)
	if strings.Contains(everything, "guess") || strings.Contains(everything, token) {
		t.Errorf("a token was written down: %s", everything)
	}
}

func TestTokenlessService(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server, func(c *Config) { c.AdminToken = "" })
	if a := p.do(t, "POST", "/api/control", `{"shadow_mode": true}`, tokenHeader, ""); a.status != 200 {
		t.Errorf("from this machine: %d %s", a.status, a.body)
	}
	for _, header := range [][]string{{"X-Forwarded-For", "127.0.0.1"}, {"Origin", "http://evil.example"}} {
		if a := p.do(t, "POST", "/api/control", `{"shadow_mode": false}`, append(header, tokenHeader, "")...); a.status != 403 {
			t.Errorf("with %v: %d %s", header, a.status, a.body)
		}
	}
	reply, header := server.Client(t).Request(t, events.SubjectConfigCommand, []byte(`{"shadow_mode": false}`), nil)
	if code := header["Nats-Service-Error-Code"]; len(code) != 1 || code[0] != "403" {
		t.Errorf("over NATS: %s %v", reply, header)
	}
	if v, doc := p.config(t); v.Version != 2 || !doc.ShadowMode {
		t.Errorf("version %d, shadow mode %v", v.Version, doc.ShadowMode)
	}

	open := bustest.Start(t)
	startPlane(t, open, func(c *Config) { c.AdminToken, c.AllowTokenlessNATS = "", true })
	reply, header = open.Client(t).Request(t, events.SubjectConfigCommand, []byte(`{"shadow_mode": true}`), nil)
	if string(reply) != `{"version":2,"changed":["shadow_mode"],"diff":[{"path":"shadow_mode","from":false,"to":true}]}` {
		t.Errorf("over NATS where it is allowed: %s %v", reply, header)
	}
}

func TestCommandsOverNATS(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	client := server.Client(t)
	withToken := map[string][]string{tokenHeader: {token}}
	ask := func(body string, header map[string][]string) (string, string) {
		reply, h := client.Request(t, events.SubjectConfigCommand, []byte(body), header)
		return string(reply), strings.Join(h["Nats-Service-Error-Code"], ",")
	}

	if reply, code := ask(`{"routes": {"fast": {"capacity": 3}}}`, withToken); code != "" || reply != `{"version":2,"changed":["routes.fast.capacity"],"diff":[{"path":"routes.fast.capacity","from":20,"to":3}]}` {
		t.Errorf("a change: %s, code %q", reply, code)
	}
	if v, doc := p.config(t); v.Version != 2 || v.Via != "nats" || doc.Routes["fast"].Capacity != 3 {
		t.Errorf("config is %+v", v)
	}
	for name, c := range map[string]struct {
		body   string
		header map[string][]string
		code   string
		path   string
	}{
		"no token":    {`{"shadow_mode": true}`, nil, "401", ""},
		"wrong token": {`{"shadow_mode": true}`, map[string][]string{tokenHeader: {"wrong"}}, "401", ""},
		"bad change":  {`{"routes": {"fast": {"capacity": 0}}}`, withToken, "400", "routes.fast.capacity"},
		"empty":       {``, withToken, "400", ""},
		"stale":       {`{"shadow_mode": true}`, map[string][]string{tokenHeader: {token}, "If-Match": {"1"}}, "409", ""},
	} {
		reply, code := ask(c.body, c.header)
		got := decodeJSON[problem](t, []byte(reply))
		if code != c.code || strconv.Itoa(got.Status) != c.code || got.Detail == "" {
			t.Errorf("%s: %s, code %q, want %s", name, reply, code, c.code)
		}
		if c.path != "" && (len(got.Errors) != 1 || got.Errors[0].Path != c.path) {
			t.Errorf("%s: errors %v", name, got.Errors)
		}
	}
	if reply, code := ask(`{"shadow_mode": true}`, map[string][]string{tokenHeader: {token}, "if-match": {"2"}}); code != "" {
		t.Errorf("at the version in force: %s", reply)
	}

	// A plain publish gets no answer, and works all the same.
	client.Publish(t, events.SubjectConfigCommand, []byte(`{"routes": {"fast": {"capacity": 9}}}`), withToken)
	bustest.Await(t, "the published change", func() bool { v, _ := p.config(t); return v.Version == 4 })
	client.Publish(t, events.SubjectConfigCommand, []byte(`{"shadow_mode": false}`), nil)
	bustest.Await(t, "the log of the refusal", func() bool { return strings.Contains(p.log.String(), "must carry the admin token") })
	if v, doc := p.config(t); v.Version != 4 || !doc.ShadowMode || doc.Routes["fast"].Capacity != 9 {
		t.Errorf("version %d: %+v", v.Version, doc.Routes["fast"])
	}
}

func TestServiceIsFoundByDiscovery(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	startPlane(t, server)
	reply, _ := server.Client(t).Request(t, "$SRV.INFO.aegis-config", nil, nil)
	info := decodeJSON[struct {
		Name      string
		Endpoints []struct{ Name, Subject string }
	}](t, reply)
	if info.Name != "aegis-config" || len(info.Endpoints) != 1 || info.Endpoints[0].Subject != events.SubjectConfigCommand {
		t.Errorf("got %s", reply)
	}
}

func TestGuessingOverNATS(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	client := server.Client(t)
	codes := map[string]int{}
	for i := range maxFailures + 3 {
		given := fmt.Sprint("guess", i)
		if i == maxFailures+2 {
			given = token
		}
		_, h := client.Request(t, events.SubjectConfigCommand, []byte(`{"shadow_mode": true}`), map[string][]string{tokenHeader: {given}})
		codes[strings.Join(h["Nats-Service-Error-Code"], ",")]++
	}
	if diff := cmp.Diff(map[string]int{"401": maxFailures, "429": 3}, codes); diff != "" {
		t.Errorf("codes (-want +got)\n%s", diff)
	}
	if v, _ := p.config(t); v.Version != 1 {
		t.Errorf("version is %d", v.Version)
	}
}

func TestChangeOfAStaleVersion(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p, q := startPlane(t, server), startPlane(t, server)
	p.post(t, `{"shadow_mode": true}`, "If-Match", `"1"`)
	// The other replica refuses what was meant for the old version, even at once.
	a := q.do(t, "POST", "/api/control", `{"shadow_mode": false}`, "If-Match", `"1"`)
	if got := a.problem(t); a.status != 409 || got.Version != 2 {
		t.Errorf("got %d %s, want 409 naming version 2", a.status, a.body)
	}
	if reply := q.post(t, `{"shadow_mode": false}`, "If-Match", "2"); reply.Version != 3 {
		t.Errorf("got %+v", reply)
	}
	for _, bad := range []string{`"x"`, `W/"3"`, `"3", "2"`, "0", "-1"} {
		if a := p.do(t, "POST", "/api/control", `{"shadow_mode": true}`, "If-Match", bad); a.status != 400 {
			t.Errorf("If-Match %s: %d %s", bad, a.status, a.body)
		}
	}
}

// Many writers on two replicas change different things: every change is in the
// end, every reply names a version of its own, and nobody was told a lie.
func TestConcurrentWritersLoseNothing(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	planes := []*plane{startPlane(t, server), startPlane(t, server)}
	var patches []string
	want := map[string]int64{}
	for i, route := range []string{"fast", "slow", "fail", "cost"} {
		for j, field := range []string{"capacity", "sliding_limit", "max_debt", "refill_rate", "window_seconds"} {
			value := int64(100 + 10*i + j)
			patches = append(patches, fmt.Sprintf(`{"routes": {%q: {%q: %d}}}`, route, field, value))
			want[route+"."+field] = value
		}
	}
	var mu sync.Mutex
	seen := map[uint64]string{}
	var wg sync.WaitGroup
	for i, patch := range patches {
		wg.Go(func() {
			a := planes[i%2].do(t, "POST", "/api/control", patch)
			var reply events.ConfigReply
			if err := json.Unmarshal([]byte(a.body), &reply); err != nil || a.status != 200 || len(reply.Changed) != 1 {
				t.Errorf("%s: %d %s", patch, a.status, a.body)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if other, taken := seen[reply.Version]; taken {
				t.Errorf("version %d was given to %s and to %s", reply.Version, other, patch)
			}
			seen[reply.Version] = patch
		})
	}
	wg.Wait()
	all := versionsIn(t, server.Bus(t))
	if len(all) != len(patches)+1 {
		t.Errorf("the stream has %d versions, want %d", len(all), len(patches)+1)
	}
	last := decodeJSON[struct {
		Routes map[string]map[string]any
	}](t, all[len(all)-1].Document)
	for at, value := range want {
		route, field, _ := strings.Cut(at, ".")
		if got := last.Routes[route][field]; got != float64(value) {
			t.Errorf("%s is %v in the end, want %d", at, got, value)
		}
	}
	for i, v := range all {
		if v.Version != uint64(i+1) {
			t.Errorf("version %d stands in place %d", v.Version, i+1)
		}
	}
}

// Writers that name the version they saw: of those for one version exactly one
// wins, the others are told.
func TestConcurrentWritersOfOneVersion(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	planes := []*plane{startPlane(t, server), startPlane(t, server)}
	for round := uint64(1); round <= 5; round++ {
		var mu sync.Mutex
		statuses := map[int]int{}
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				patch := fmt.Sprintf(`{"routes": {"fast": {"capacity": %d}}}`, 1000*round+uint64(i))
				a := planes[i%2].do(t, "POST", "/api/control", patch, "If-Match", fmt.Sprint(round))
				mu.Lock()
				defer mu.Unlock()
				statuses[a.status]++
			})
		}
		wg.Wait()
		if diff := cmp.Diff(map[int]int{200: 1, 409: 5}, statuses); diff != "" {
			t.Errorf("round %d (-want +got)\n%s", round, diff)
		}
	}
}

// What seems to change nothing may undo what another replica just did.
func TestNoOpIsJudgedByTheStream(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p, q := startPlane(t, server), startPlane(t, server)
	for i := range 30 {
		on := i%2 == 0
		writer, other := p, q
		if i%3 == 0 {
			writer, other = q, p
		}
		writer.post(t, fmt.Sprintf(`{"shadow_mode": %v}`, on))
		if reply := other.post(t, fmt.Sprintf(`{"shadow_mode": %v}`, !on)); len(reply.Changed) != 1 {
			t.Fatalf("round %d: the second write was taken for a no-op: %+v", i, reply)
		}
		writer.post(t, fmt.Sprintf(`{"shadow_mode": %v}`, on))
	}
}

func TestOutageOfNATS(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	p.post(t, `{"shadow_mode": true}`)
	server.Stop()
	bustest.Await(t, "the loss to be noticed", func() bool { return !p.bus.Connected() })

	if v, doc := p.config(t); v.Version != 2 || !doc.ShadowMode {
		t.Errorf("during the outage the config is version %d", v.Version)
	}
	a := p.do(t, "POST", "/api/control", `{"shadow_mode": false}`)
	if got := a.problem(t); a.status != 503 || a.header.Get("Retry-After") == "" || !strings.Contains(got.Detail, "nothing was changed") {
		t.Errorf("a change during the outage: %d %s", a.status, a.body)
	}
	if _, err := p.Ready(t.Context()); err == nil {
		t.Error("ready without NATS")
	}
	if a := p.do(t, "GET", "/api/status", ""); a.status != 200 || !strings.Contains(a.body, `"connected":false`) {
		t.Errorf("status: %d %s", a.status, a.body)
	}

	server.Restart()
	p.awaitReady(t)
	if reply := p.post(t, `{"shadow_mode": false}`); reply.Version != 3 {
		t.Errorf("after the outage: %+v", reply)
	}
	// What was audited meanwhile is kept.
	b := server.Bus(t)
	bustest.Await(t, "audit events", func() bool {
		var results []string
		for _, a := range stored(t, b, events.StreamAudit, events.Decode[events.Audit]) {
			results = append(results, a.Result)
		}
		return cmp.Equal(results, []string{"ok", "refused", "ok"})
	})
}

func TestStartBeforeNATS(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	server.Stop()
	file := examplePolicy(t)
	p := newPlane(t, server.Bus(t), func(c *Config) { c.PolicyFile = file })
	if a := p.do(t, "GET", "/api/config", ""); a.status != 503 {
		t.Errorf("before NATS: %d %s", a.status, a.body)
	}
	server.Restart()
	p.awaitReady(t)
	if v, _ := p.config(t); v.Version != 1 {
		t.Errorf("version is %d", v.Version)
	}
}

// The answer to a publish is lost on the way: the caller is told that it does not know.
func TestLostAnswerOfAPublish(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t, bustest.Listen())
	proxy := bustest.NewProxy(t, strings.TrimPrefix(server.URL(), "nats://"))
	file := examplePolicy(t)
	b := server.Bus(t, func(c *bus.Config) { c.InProcess, c.URL = nil, "nats://"+proxy.Addr() })
	p := newPlane(t, b, func(c *Config) { c.PolicyFile = file })
	p.awaitReady(t)
	_, at, err := p.versions.latest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	proxy.Mute()
	next := p.versions.current().policy
	next.ShadowMode = true
	_, err = p.versions.append(t.Context(), at, caller{by: "test", via: "http"}, next)
	if !errors.Is(err, bus.ErrUnavailable) {
		t.Fatalf("got %v, want bus.ErrUnavailable", err)
	}
	if got := notStored(err); got.Status != 503 || !strings.Contains(got.Detail, "may or may not") {
		t.Errorf("the refusal is %+v", got)
	}
	proxy.Heal()
	// It was stored, and the replica learns of it as of anybody's.
	bustest.Await(t, "the stored version", func() bool { return p.versions.current().Version == 2 })
}

func TestLostStreamIsRestored(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	p.post(t, `{"shadow_mode": true}`)
	p.post(t, `{"routes": {"fast": {"capacity": 77}}}`)
	server.DeleteStream(t, events.StreamConfig)
	// A change in between finds no stream, and says so.
	if a := p.do(t, "POST", "/api/control", `{"algorithm": "sliding_window"}`); a.status != 503 {
		t.Errorf("without the stream: %d %s", a.status, a.body)
	}
	b := server.Bus(t)
	bustest.Await(t, "the restored stream", func() bool {
		last, err := b.Last(t.Context(), events.StreamConfig, events.SubjectConfigUpdates)
		return err == nil && last.Seq == 1
	})
	bustest.Await(t, "the restored version", func() bool { v, _ := p.config(t); return v.Version == 1 })
	if v, doc := p.config(t); v.Via != "restore" || !doc.ShadowMode || doc.Routes["fast"].Capacity != 77 {
		t.Errorf("restored: via %s, shadow mode %v, fast %+v", v.Via, doc.ShadowMode, doc.Routes["fast"])
	}
	if reply := p.post(t, `{"shadow_mode": false}`); reply.Version != 2 {
		t.Errorf("after the restore: %+v", reply)
	}
}

// What is no good version does not take the controlplane down, nor the place of the last good one.
func TestBadVersionInTheStream(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	p.post(t, `{"shadow_mode": true}`)
	b := server.Bus(t)
	good := versionsIn(t, b)[1]
	for _, bad := range []any{
		"garbage",
		events.ConfigVersion{Version: 4, By: "x", Via: "x", Document: []byte(`{"routes": {"r": {"path": "nowhere"}}}`)},
		events.ConfigVersion{Version: 99, By: "x", Via: "x", Document: good.Document},
	} {
		data := []byte(fmt.Sprint(bad))
		if v, ok := bad.(events.ConfigVersion); ok {
			var err error
			if data, err = events.Encode(v); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := b.Publish(t.Context(), events.SubjectConfigUpdates, data); err != nil {
			t.Fatal(err)
		}
	}
	// What is no version at all is followed by the last good one: without it a healthwatch
	// or an edge that starts now would find none.
	bustest.Await(t, "the last good version, again", func() bool {
		last, err := b.Last(t.Context(), events.StreamConfig, events.SubjectConfigUpdates)
		if err != nil {
			t.Fatal(err)
		}
		v, err := events.DecodeConfig(last.Data, last.Seq)
		return err == nil && v.Version > 5 && v.Via == "restore" && bytes.Equal(v.Document, good.Document)
	})
	bustest.Await(t, "the version in force", func() bool { v, _ := p.config(t); return v.Via == "restore" })
	v, _ := p.config(t)
	// A policy that only this release finds bad stays; a replica that starts now looks back behind it.
	odd, err := events.Encode(events.ConfigVersion{Version: v.Version + 1, By: "x", Via: "x", Document: []byte(`{"routes": {"r": {"path": "nowhere"}}}`)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Publish(t.Context(), events.SubjectConfigUpdates, odd); err != nil {
		t.Fatal(err)
	}
	q := newPlane(t, server.Bus(t))
	q.awaitReady(t)
	if w, doc := q.config(t); w.Version != v.Version || !doc.ShadowMode {
		t.Errorf("a new replica has version %d, the old one %d", w.Version, v.Version)
	}
	for i, r := range []*plane{p, q} {
		if reply := r.post(t, fmt.Sprintf(`{"routes": {"fast": {"capacity": %d}}}`, 5+i)); reply.Version != v.Version+2+uint64(i) {
			t.Errorf("the next change gave %+v, want version %d", reply, v.Version+2+uint64(i))
		}
	}
}

// A config of a newer release has keys that this one would lose.
func TestNewerConfigIsNotCutDown(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	doc := bytes.Replace(versionsIn(t, server.Bus(t))[0].Document, []byte(`{`), []byte(`{"later":{"x":1},`), 1)
	data, err := events.Encode(events.ConfigVersion{Version: 2, By: "newer", Via: "http", Document: doc})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := server.Bus(t).Publish(t.Context(), events.SubjectConfigUpdates, data); err != nil {
		t.Fatal(err)
	}
	a := p.do(t, "POST", "/api/control", `{"shadow_mode": true}`)
	if got := a.problem(t); a.status != 503 || !strings.Contains(got.Detail, "later") {
		t.Errorf("got %d %s", a.status, a.body)
	}
	bustest.Await(t, "the newer version", func() bool {
		return strings.Contains(p.do(t, "GET", "/api/config", "").body, `"later":{"x":1}`)
	})
}

func TestAuditOfChanges(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	p.post(t, `{"shadow_mode": true}`)
	p.post(t, `{"shadow_mode": true}`)
	p.do(t, "POST", "/api/control", `{"bogus": true}`)
	p.do(t, "POST", "/api/control", `{"shadow_mode": false}`, "If-Match", "1")
	p.do(t, "POST", "/api/control", `{"shadow_mode": false}`, tokenHeader, "wrong")
	var got []events.Audit
	b := server.Bus(t)
	bustest.Await(t, "audit events", func() bool {
		got = stored(t, b, events.StreamAudit, events.Decode[events.Audit])
		return len(got) == 5
	})
	for i, want := range []struct{ result, detail string }{
		{"ok", "version 2: shadow_mode"},
		{"ok", "nothing to change in version 2"},
		{"refused", "bogus"},
		{"conflict", "version 2 is in force"},
		{"unauthenticated", "wrong"},
	} {
		if a := got[i]; a.Result != want.result || !strings.Contains(a.Detail, want.detail) || a.Action != actionChange || a.By != "127.0.0.1" {
			t.Errorf("event %d is %+v, want %v", i, a, want)
		}
	}
}

// Whatever was answered is audited, also when the service stops at once.
func TestStopKeepsAudits(t *testing.T) {
	t.Parallel()
	const requests = 60
	server := bustest.Start(t)
	p := startPlane(t, server)
	var wg sync.WaitGroup
	for range requests {
		wg.Go(func() { p.do(t, "POST", "/api/control", `{"bogus": true}`) })
	}
	wg.Wait()
	p.stop()
	if n := len(stored(t, server.Bus(t), events.StreamAudit, events.Decode[events.Audit])); n != requests {
		t.Errorf("%d audit events, want %d", n, requests)
	}
}

func TestStatus(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	b := server.Bus(t)
	publish := func(m events.Health) {
		data, err := events.Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Publish(t.Context(), events.SubjectHealth(m.Upstream), data); err != nil {
			t.Fatal(err)
		}
	}
	beat := func(h events.Heartbeat) {
		data, err := events.Encode(h)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Send(events.SubjectHeartbeat(h.Edge), data); err != nil {
			t.Fatal(err)
		}
	}
	publish(events.Health{Upstream: "sample", Tick: 1, Multiplier: 1_000_000})
	publish(events.Health{Upstream: "sample", Tick: 2, Multiplier: 250_000, P95: 912_500, ErrorRate: 20_000, Samples: 30})
	publish(events.Health{Upstream: "gone", Tick: 1, Multiplier: 1})
	get := func() statusReply {
		a := p.do(t, "GET", "/api/status", "")
		if a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
		return decodeJSON[statusReply](t, []byte(a.body))
	}
	var got statusReply
	bustest.Await(t, "health and edges", func() bool {
		beat(events.Heartbeat{Edge: "e1", Boot: "b", Config: 1, Green: 3})
		beat(events.Heartbeat{Edge: "e0", Boot: "b", Config: 1, Degraded: true})
		got = get()
		return len(got.Edges) == 2 && len(got.Upstreams) == 1 && got.Upstreams[0].Tick == 2
	})
	u := got.Upstreams[0]
	if u.Upstream != "sample" || u.Multiplier != 0.25 || u.P95Ms != 912.5 || u.ErrorRate != 0.02 || u.Samples != 30 || u.Stale {
		t.Errorf("upstream is %+v", u)
	}
	if e := got.Edges[1]; e.Edge != "e1" || e.Green != 3 || !e.Alive || !got.Edges[0].Degraded {
		t.Errorf("edges are %+v", got.Edges)
	}
	if !got.Connected || got.Config == nil || got.Config.Version != 1 || got.Config.Via != "file" {
		t.Errorf("config is %+v", got.Config)
	}
	beat(events.Heartbeat{Edge: "e1", Boot: "b", Config: 1, Leaving: true})
	bustest.Await(t, "the edge to leave", func() bool { return len(get().Edges) == 1 })
}

// Bodies that never come must not hold a request for ever; this one is cut by its client.
func TestUnfinishedBody(t *testing.T) {
	t.Parallel()
	p := startPlane(t, bustest.Start(t))
	body, w := io.Pipe()
	r, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+p.Addr()+"/api/control", body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(tokenHeader, token)
	r.Header.Set("Content-Type", "application/json")
	go func() {
		io.WriteString(w, `{"shadow_mode": true`)
		w.CloseWithError(errors.New("cut"))
	}()
	if resp, err := http.DefaultClient.Do(r); err == nil {
		resp.Body.Close()
		t.Errorf("got %s", resp.Status)
	}
	if v, _ := p.config(t); v.Version != 1 {
		t.Errorf("half a body made version %d", v.Version)
	}
}

package controlplane

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// ok does a request that must succeed and decodes the answer.
func ok[T any](t *testing.T, p *plane, method, path, body string, header ...string) T {
	t.Helper()
	a := p.do(t, method, path, body, header...)
	if a.status >= 300 {
		t.Fatalf("%s %s %s: %d %s", method, path, body, a.status, a.body)
	}
	if a.status == http.StatusNoContent {
		return *new(T)
	}
	return decodeJSON[T](t, []byte(a.body))
}

// refused does a request that must fail with a status, whose detail has want in it.
func refused(t *testing.T, p *plane, status int, want, method, path, body string, header ...string) problem {
	t.Helper()
	a := p.do(t, method, path, body, header...)
	pr := a.problem(t)
	if a.status != status || !strings.Contains(pr.Detail, want) {
		t.Errorf("%s %s %s: %d %q, want %d %q", method, path, body, a.status, pr.Detail, status, want)
	}
	return pr
}

func TestHistoryDiffRollback(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	p.post(t, `{"routes":{"fast":{"capacity":7}}}`, "X-Admin-Actor", "ann", "X-Admin-Reason", "too many calls")
	p.post(t, `{"shadow_mode":true}`)

	h := ok[versionsReply](t, p, "GET", "/api/config/versions?limit=2", "")
	if len(h.Versions) != 2 || h.Versions[0].Version != 3 || h.Versions[1].Actor != "ann" || h.Versions[1].Reason != "too many calls" || h.Next != 2 {
		t.Errorf("%+v", h)
	}
	if h = ok[versionsReply](t, p, "GET", fmt.Sprintf("/api/config/versions?before=%d", h.Next), ""); len(h.Versions) != 1 || h.Versions[0].Via != "file" || h.Next != 0 {
		t.Errorf("%+v", h)
	}
	d := ok[diffReply](t, p, "GET", "/api/config/diff?from=1", "")
	if d.To != 3 || len(d.Diff) != 2 || d.Diff[0].String() != "routes.fast.capacity: 20 → 7" {
		t.Errorf("%+v", d)
	}
	if d = ok[diffReply](t, p, "GET", "/api/config/diff", ""); d.From != 2 || len(d.Diff) != 1 {
		t.Errorf("%+v", d)
	}
	if v := ok[events.ConfigVersion](t, p, "GET", "/api/config/versions/2", ""); v.Version != 2 || v.Actor != "ann" {
		t.Errorf("%+v", v)
	}

	dry := ok[events.ConfigReply](t, p, "POST", "/api/config/rollback?dry_run=true", `{"to":1}`)
	if !dry.DryRun || dry.Version != 3 || len(dry.Diff) != 2 {
		t.Errorf("%+v", dry)
	}
	if v, _ := p.config(t); v.Version != 3 {
		t.Errorf("a dry run made version %d", v.Version)
	}
	back := ok[events.ConfigReply](t, p, "POST", "/api/config/rollback", `{"to":1}`, "If-Match", `"3"`)
	v, doc := p.config(t)
	if back.Version != 4 || v.Version != 4 || doc.Routes["fast"].Capacity != 20 || doc.ShadowMode || v.Reason != "back to version 1" {
		t.Errorf("%+v, %+v", back, v)
	}
	refused(t, p, 404, "no version 99", "POST", "/api/config/rollback", `{"to":99}`)
	refused(t, p, 400, "version to go back to", "POST", "/api/config/rollback", `{}`)
	refused(t, p, 404, "no version 99", "GET", "/api/config/versions/99", "")
	refused(t, p, 400, "number", "GET", "/api/config/versions/x", "")
	refused(t, p, 400, "limit", "GET", "/api/config/versions?limit=0", "")
	if pr := refused(t, p, 409, "version 4 is in force, not 3", "POST", "/api/config/rollback", `{"to":2}`, "If-Match", "3"); pr.Version != 4 {
		t.Errorf("the loser is not told the version in force: %+v", pr)
	}
}

// TestWholeDocument: a whole policy goes the way of a change, in YAML and in JSON.
func TestWholeDocument(t *testing.T) {
	t.Parallel()
	p := startPlane(t, bustest.Start(t))
	yaml := strings.Replace(string(policy.Example()), "shadow_mode: false", "shadow_mode: true", 1)
	dry := ok[events.ConfigReply](t, p, "PUT", "/api/config?dry_run=true", yaml, "Content-Type", "application/yaml")
	if len(dry.Changed) != 1 || dry.Changed[0] != "shadow_mode" || !dry.DryRun {
		t.Errorf("%+v", dry)
	}
	if r := ok[events.ConfigReply](t, p, "PUT", "/api/config", yaml, "Content-Type", "application/yaml"); r.Version != 2 {
		t.Errorf("%+v", r)
	}
	v, _ := p.config(t)
	if r := ok[events.ConfigReply](t, p, "PUT", "/api/config", string(v.Document)); r.Version != 2 || len(r.Changed) != 0 {
		t.Errorf("the document in force changes something: %+v", r)
	}
	bad := strings.Replace(yaml, "    capacity: 20", "    capacityy: 20", 1)
	pr := refused(t, p, 400, "routes.fast.capacityy", "PUT", "/api/config", bad, "Content-Type", "application/yaml")
	if len(pr.Errors) == 0 || pr.Errors[0].Line == 0 {
		t.Errorf("%+v", pr)
	}
	refused(t, p, 415, "application/json", "POST", "/api/control", "shadow_mode: true", "Content-Type", "application/yaml")
	if v, _ := p.config(t); v.Version != 2 {
		t.Errorf("version %d", v.Version)
	}
}

// TestTwoReplicasConcurrentWriters: nothing is lost, and who names a version that is not in force is told
// which is.
func TestTwoReplicasConcurrentWriters(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	planes := []*plane{startPlane(t, server), startPlane(t, server)}
	const writers, writes = 6, 5
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			p := planes[w%2]
			for i := range writes {
				patch := fmt.Sprintf(`{"routes":{"%s":{"capacity":%d}}}`, []string{"fast", "slow", "fail"}[w/2], 1000+w*100+i)
				a := p.do(t, "POST", "/api/control", patch)
				if a.status != http.StatusOK {
					t.Errorf("writer %d: %d %s", w, a.status, a.body)
				}
			}
		})
	}
	wg.Wait()
	versions := versionsIn(t, server.Bus(t))
	if len(versions) != 1+writers*writes {
		t.Errorf("%d versions, want %d: a change was lost or made twice", len(versions), 1+writers*writes)
	}
	// Each version differs from the one before by exactly one change: no writer overwrote another.
	for i := 1; i < len(versions); i++ {
		a, err := policy.Parse(versions[i-1].Document)
		if err != nil {
			t.Fatal(err)
		}
		b, err := policy.Parse(versions[i].Document)
		if err != nil {
			t.Fatal(err)
		}
		if d, err := policy.Diff(a, b); err != nil || len(d) != 1 {
			t.Errorf("version %d: %v, %v", versions[i].Version, d, err)
		}
	}

	// All of them meant for the version in force: one wins.
	at := fmt.Sprint(len(versions))
	var mu sync.Mutex
	won, lost := 0, 0
	for w := range writers {
		wg.Go(func() {
			a := planes[w%2].do(t, "POST", "/api/control", fmt.Sprintf(`{"routes":{"fast":{"capacity":%d}}}`, 1+w), "If-Match", at)
			mu.Lock()
			defer mu.Unlock()
			switch a.status {
			case http.StatusOK:
				won++
			case http.StatusConflict:
				lost++
				if pr := decodeJSON[problem](t, []byte(a.body)); pr.Version != uint64(len(versions)+1) {
					t.Errorf("a loser is told version %d", pr.Version)
				}
			default:
				t.Errorf("%d %s", a.status, a.body)
			}
		})
	}
	wg.Wait()
	if won != 1 || lost != writers-1 {
		t.Errorf("%d won, %d were told", won, lost)
	}
}

// TestConfigBomb: what is too large, too deep or no number is refused whole, with its path, by every way
// in, and the version in force stays.
func TestConfigBomb(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	client := server.Client(t)
	routes := make([]string, 1001)
	for i := range routes {
		routes[i] = fmt.Sprintf(`"r%d":{"path":"/r%d","deny":true}`, i, i)
	}
	bombs := []string{
		strings.Repeat("[", 10_000), `{"routes":` + strings.Repeat(`{"a":`, 10_000) + strings.Repeat("}", 10_001),
		`{"routes":{"fast":{"capacity":NaN}}}`, `{"routes":{"fast":{"capacity":0}}}`, `{"routes":{"fast":{"refill_rate":1e308}}}`,
		`{"routes":{"fast":{"refill_rate":1e309}}}`, `{"routes":{"fast":{"capacity":-5}}}`, `{"routes":{"fast":{"capacity":1e999999999}}}`,
		`{"shadow_mode":true,"shadow_mode":false}`, `{"__proto__":{}}`, `{"routes":{` + strings.Join(routes, ",") + `}}`, "\x00", `"`, ``,
	}
	for _, bomb := range bombs {
		name := bomb[:min(len(bomb), 40)]
		for _, path := range []string{"/api/control", "/api/config"} {
			method := "POST"
			if path == "/api/config" {
				method = "PUT"
			}
			a := p.do(t, method, path, bomb, "Content-Type", "application/json")
			if a.status != http.StatusBadRequest {
				t.Errorf("%s %s %q: %d %s", method, path, name, a.status, a.body[:min(len(a.body), 200)])
			}
		}
		reply, header := client.Request(t, events.SubjectConfigCommand, []byte(bomb), map[string][]string{tokenHeader: {token}})
		if h := header["Nats-Service-Error-Code"]; len(h) != 1 || h[0] != "400" {
			t.Errorf("over NATS %q: %v %.200s", name, header, reply)
		}
	}
	if a := p.do(t, "PUT", "/api/config", strings.Repeat(" ", policy.MaxDocument+1)); a.status != http.StatusRequestEntityTooLarge {
		t.Errorf("a document above the bound: %d", a.status)
	}
	if v, _ := p.config(t); v.Version != 1 {
		t.Errorf("version %d is in force", v.Version)
	}
}

// TestEveryRequestOverNATS: the API is one, whichever way a request comes.
func TestEveryRequestOverNATS(t *testing.T) {
	t.Parallel()
	server := bustest.Start(t)
	p := startPlane(t, server)
	client := server.Client(t)
	ask := func(method, path, body string, header map[string][]string) (string, string) {
		t.Helper()
		if header == nil {
			header = map[string][]string{tokenHeader: {token}}
		}
		header[events.HeaderMethod], header[events.HeaderPath] = []string{method}, []string{path}
		reply, h := client.Request(t, events.SubjectControl, []byte(body), header)
		code := ""
		if c := h["Nats-Service-Error-Code"]; len(c) > 0 {
			code = c[0]
		}
		return string(reply), code
	}
	for _, op := range operations {
		path := strings.NewReplacer("{version}", "1", "{user}", "nobody", "{key}", "k", "{route}", "fast", "{plan}", "gone", "{client}", "ip:192.0.2.1").Replace(op.path)
		reply, natsCode := ask(op.method, path, `{"unknown":1}`, nil)
		a := p.do(t, op.method, path, `{"unknown":1}`)
		if op.method == "GET" {
			a = p.do(t, op.method, path, "")
		}
		want := ""
		if a.status >= 400 {
			want = fmt.Sprint(a.status)
		}
		if natsCode != want {
			t.Errorf("%s %s: over NATS %q %s, over HTTP %d %s", op.method, path, natsCode, reply, a.status, a.body)
		}
	}
	if _, code := ask("GET", "/api/config", "", map[string][]string{tokenHeader: {"wrong"}}); code != "401" {
		t.Errorf("with a wrong token: %s", code)
	}
	for _, c := range [][2]string{{"GET", "api/config"}, {"G E T", "/"}, {"", ""}, {"GET", "/%zz"}} {
		if reply, code := ask(c[0], c[1], "", nil); code == "" {
			t.Errorf("%q: %s", c, reply)
		}
	}
	reply, code := ask("POST", "/api/control", `{"shadow_mode":true}`, map[string][]string{tokenHeader: {token}, "X-Admin-Actor": {"ann"}, "if-match": {"1"}})
	var r events.ConfigReply
	if err := json.Unmarshal([]byte(reply), &r); err != nil || code != "" || r.Version != 2 {
		t.Errorf("%s %s", code, reply)
	}
	if v, _ := p.config(t); v.Via != "nats" || v.Actor != "ann" {
		t.Errorf("%+v", v)
	}
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/cmd/aegis/stack"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

const cliToken = "operator's token"

// console runs commands as an operator's shell would.
type console struct {
	t      *testing.T
	server string
	token  string
	ran    map[string]bool // the leaves of the command tree that were run
}

// run runs one command and wants an exit code.
func (c *console) run(want int, args ...string) string {
	c.t.Helper()
	var out, errs bytes.Buffer
	env := map[string]string{"AEGIS_ADMIN_TOKEN": c.token, "USER": "op"}
	code := run(c.t.Context(), append([]string{"--server", c.server}, args...), func(name string) string { return env[name] }, &out, &errs)
	if code != want {
		c.t.Errorf("aegis %q: exit %d, want %d\n%s%s", args, code, want, out.String(), errs.String())
	}
	words := slices.DeleteFunc(slices.Clone(args), func(a string) bool { return strings.HasPrefix(a, "-") })
	for n := range words {
		c.ran[strings.Join(words[:n+1], " ")] = true
	}
	return out.String() + errs.String()
}

// json runs a command with --json and reads its answer.
func (c *console) json(args ...string) map[string]any {
	c.t.Helper()
	text := c.run(0, append(args, "--json")...)
	var v map[string]any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		c.t.Errorf("aegis %q: %v: %s", args, err, text)
	}
	return v
}

func liveStack(t *testing.T) *stack.Stack {
	t.Helper()
	s, err := stack.Start(t.Context(), stack.Config{
		EdgeAddr: "127.0.0.1:0", ControlAddr: "127.0.0.1:0", NATSAddr: "127.0.0.1:0", UpstreamAddr: "127.0.0.1:0",
		EdgeAdminAddr: "127.0.0.1:0", SettlerAdminAddr: "127.0.0.1:0", HealthwatchAdminAddr: "127.0.0.1:0", ControlAdminAddr: "127.0.0.1:0",
		DataDir: t.TempDir(), AdminToken: cliToken, Log: zerolog.Nop(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// TestEveryCommand runs every command that asks the controlplane on a live stack, over HTTP and over NATS,
// for people and with --json.
func TestEveryCommand(t *testing.T) {
	s := liveStack(t)
	edge := "http://" + s.Edges()[0].Addr()
	for i, server := range []string{"http://" + s.Controlplane().Addr(), s.NATSURL()} {
		t.Run(strings.SplitN(server, ":", 2)[0], func(t *testing.T) {
			c := &console{t: t, server: server, token: cliToken, ran: map[string]bool{}}
			user, plan := fmt.Sprintf("ann%d", i), fmt.Sprintf("gold%d", i)
			has := func(text string, want ...string) {
				t.Helper()
				for _, w := range want {
					if !strings.Contains(text, w) {
						t.Errorf("no %q in:\n%s", w, text)
					}
				}
			}
			file := filepath.Join(t.TempDir(), "policy.json")
			put := func(doc string) {
				if err := os.WriteFile(file, []byte(doc), 0o600); err != nil {
					t.Fatal(err)
				}
			}

			// The policy.
			put(c.run(0, "get"))
			has(c.run(0, "validate", file), "valid")
			doc, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			shadow := []string{`"shadow_mode": false`, `"shadow_mode": true`}
			put(strings.Replace(string(doc), shadow[0], shadow[1], 1))
			has(c.run(0, "diff", "-f", file), "Would change", "shadow_mode: false → true")
			applied := c.json("apply", "-f", file, "-m", "trying")
			version := int(applied["version"].(float64))
			has(c.run(0, "apply", "-f", file), "Nothing to change")
			c.run(exitConflict, "apply", "-f", file, "--if-match", "1")
			has(c.run(0, "diff"), "shadow_mode: false → true")
			has(c.run(0, "history"), "trying", "op")
			if v := c.json("history", "--limit", "1"); len(v["versions"].([]any)) != 1 {
				t.Errorf("%v", v)
			}
			has(c.run(0, "rollback", fmt.Sprint(version-1)), "shadow_mode: true → false")
			if v := c.json("get", fmt.Sprint(version)); v["version"] != float64(version) {
				t.Errorf("%v", v)
			}
			c.run(exitNotFound, "get", "9999")
			put(`{"routes": {"x": {"path": "/x", "upstream": "nowhere", "capacityy": 3}}}`)
			has(c.run(exitInvalid, "apply", "-f", file), "capacityy", "line 1")
			c.run(exitInvalid, "validate", file)
			c.run(exitFailed, "validate", file+".missing")

			has(c.run(0, "route", "list"), "fast", "/api/fast")
			has(c.run(0, "route", "get", "fast"), `"capacity"`)
			has(c.run(0, "route", "set", "fast", fmt.Sprintf("capacity=%d", 30+i)), "routes.fast.capacity")
			has(c.run(exitInvalid, "route", "set", "fast", "capacity=0"), "routes.fast.capacity")
			c.run(exitUsage, "route", "set", "fast", "capacity")
			has(c.run(0, "route", "add", "extra", "path=/extra", "upstream=sample", "capacity=3", "refill_rate=0.5"), "routes.extra")
			has(c.run(0, "route", "delete", "extra"), "routes.extra")
			c.run(exitNotFound, "route", "delete", "extra")
			c.run(exitNotFound, "route", "get", "extra")

			// Users, plans and keys.
			has(c.run(0, "plan", "set", plan, "rate=7", "burst=9", "rpm=4321", "tpm=98765"), plan)
			has(c.run(0, "plan", "list"), plan, "4321", "98765", "rules", "growth", "policy")
			has(c.run(0, "user", "create", user, "--plan", plan), plan)
			c.run(exitConflict, "user", "create", user)
			c.run(exitInvalid, "user", "create", "Not A Name")
			if v := c.json("user", "list", "--plan", plan); len(v["users"].([]any)) != 1 {
				t.Errorf("%v", v)
			}
			has(c.run(0, "user", "set", user, "--plan", "growth"), "growth")
			key := c.json("key", "create", user, "--label", "laptop", "--for", "24h")
			secret, id := key["key"].(string), key["id"].(string)
			has(c.run(0, "key", "list", user), id, "laptop")
			has(c.run(0, "user", "get", user), id)
			if got := get(t, edge+"/api/fast", secret); !strings.HasPrefix(got, "200") {
				t.Errorf("a request with the new key: %s", got)
			}
			has(c.run(0, "user", "override", user, "slow", "capacity=99", "refill_rate=9", "--for", "1h"), "slow", "99")
			has(c.run(0, "user", "unoverride", user, "slow"), "slow")
			c.run(exitNotFound, "user", "unoverride", user, "slow")

			// Single clients.
			client := "user:" + user
			has(c.run(0, "client", "show", client), "fast", "@plan", "@day")
			has(c.run(0, "client", "grant", client, "5", "--scope", "@day"), "@day")
			has(c.run(0, "client", "reset", client), "@plan")
			has(c.run(0, "client", "raise", client, "fast", "capacity=77", "refill_rate=7", "--for", "10m"), "77")
			bustest.Await(t, "the raised limit on the edge", func() bool { return get(t, edge+"/api/fast", secret) == "200 77" })
			has(c.run(0, "client", "block", client, "-m", "abuse"), "abuse")
			bustest.Await(t, "the block on the edge", func() bool { return strings.HasPrefix(get(t, edge+"/api/fast", secret), "403") })
			has(c.run(0, "client", "unblock", client), user)
			bustest.Await(t, "the edge lets it in again", func() bool { return strings.HasPrefix(get(t, edge+"/api/fast", secret), "200") })
			address := fmt.Sprintf("ip:2001:db8:%d::/64", i+1)
			has(c.run(0, "client", "block", address, "--for", "1m"), address)
			has(c.run(0, "user", "list", "--addresses"), address)
			has(c.run(0, "client", "show", address), "blocked  true")
			c.run(0, "client", "unblock", address)
			c.run(exitNotFound, "client", "show", "user:nobody")
			c.run(exitInvalid, "client", "show", "nonsense nonsense")

			has(c.run(0, "key", "delete", user, id), "withdrawn")
			has(c.run(0, "user", "delete", user), "gone")
			has(c.run(0, "plan", "delete", plan), "gone")
			c.run(exitNotFound, "user", "get", user)

			// Watching.
			has(c.run(0, "top", "--once"), "edge-1", "alive")
			if v := c.json("top", "--once"); v["connected"] != true {
				t.Errorf("%v", v)
			}
			has(c.run(0, "doctor"), "stream AEGIS_CONFIG", "redis clock", "rules")
			if v := c.json("doctor"); len(v["findings"].([]any)) < 10 {
				t.Errorf("%v", v)
			}
			c.token = "wrong"
			has(c.run(exitDenied, "doctor"), "--token-file")
			c.run(exitDenied, "get")
			c.token = cliToken

			for _, leaf := range leaves(t) {
				if !c.ran[leaf] {
					t.Errorf("aegis %s was not run", leaf)
				}
			}
		})
	}
}

// get asks the edge with an API key, and gives the status and the limit that it names.
func get(t *testing.T, url, key string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-API-Key", key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return fmt.Sprintf("%d %s", resp.StatusCode, resp.Header.Get("RateLimit-Limit"))
}

// leaves are the commands that ask the controlplane.
func leaves(t *testing.T) []string {
	t.Helper()
	k, err := kong.New(new(commands))
	if err != nil {
		t.Fatal(err)
	}
	alone := []string{"up", "upstream", "healthcheck", "policy", "completion", "version", "deadletter"} // ask nobody; tested elsewhere
	var out []string
	for _, leaf := range k.Model.Leaves(true) {
		words := strings.Fields(leaf.FullPath())[1:]
		words = slices.DeleteFunc(words, func(w string) bool { return strings.HasPrefix(w, "<") || strings.HasPrefix(w, "[") })
		if !slices.Contains(alone, words[0]) {
			out = append(out, strings.Join(words, " "))
		}
	}
	if len(out) < 25 {
		t.Fatalf("the command tree has only %q", out)
	}
	return out
}

// TestWithoutController: each way of not reaching it has its exit code, and nothing hangs.
func TestWithoutController(t *testing.T) {
	t.Parallel()
	for _, server := range []string{"http://127.0.0.1:1", "nats://127.0.0.1:1"} {
		c := &console{t: t, server: server, ran: map[string]bool{}}
		c.run(exitUnavailable, "get")
		if text := c.run(exitUnavailable, "doctor"); !strings.Contains(text, "start the controlplane") {
			t.Errorf("%s", text)
		}
	}
	c := &console{t: t, server: "http://127.0.0.1:1", ran: map[string]bool{}}
	c.run(exitUsage, "frobnicate")
	c.run(exitUsage, "get", "not-a-number")
	c.run(exitOK, "--help")
	c.run(exitOK, "client", "raise", "--help")
	c.run(exitOK, "version", "--json")
	if text := c.run(exitOK, "policy", "schema"); !json.Valid([]byte(text)) {
		t.Error("the schema is no JSON")
	}
	if text := c.run(exitOK, "policy", "example"); text != string(policy.Example()) {
		t.Error("the example is another")
	}
	if text := c.run(exitOK, "completion", "-c", "bash"); !strings.Contains(text, "complete") {
		t.Errorf("completion for bash: %s", text)
	}
}

// TestSecretsAreNoFlags: no program takes a password or a token by a flag, where others can read it.
func TestSecretsAreNoFlags(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	run(context.Background(), []string{"up", "--help"}, func(string) string { return "" }, &out, &out)
	for _, flag := range []string{"password=", "token=", "secret="} {
		if strings.Contains(out.String(), flag) {
			t.Errorf("aegis up has a flag %q:\n%s", flag, out.String())
		}
	}
}

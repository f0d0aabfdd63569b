package archtest_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/aegisrate/aegisrate/internal/archtest"
)

func TestWorkspaceKeepsTheRules(t *testing.T) {
	t.Parallel()
	found, err := archtest.Check(os.DirFS(root(t)))
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range found {
		t.Error(v)
	}
}

// TestRulesBite plants a violation of each rule, and beside it the nearest thing that is allowed.
func TestRulesBite(t *testing.T) {
	t.Parallel()
	cases := []struct {
		rule  string // the rule expected to fire, "" for none
		name  string
		files map[string]string
	}{
		{"core-is-pure", "library in lua", tree("lua/lua.go", "lua", "github.com/rs/zerolog")},
		{"core-is-pure", "clock in the algorithms", tree("pkg/bucket/token.go", "bucket", "time")},
		{"core-is-pure", "structured log in the algorithms", tree("pkg/bucket/token.go", "bucket", "log/slog")},
		{"", "test of the algorithms with a library and a clock", tree("pkg/bucket/token_test.go", "bucket", "time", "pgregory.net/rapid")},
		{"", "embed in lua", tree("lua/lua.go", "lua", "embed")},
		{"admission-knows-no-http", "direct", tree("services/edge/admission/decide.go", "admission", "net/http")},
		{"admission-knows-no-http", "below it", tree("services/edge/admission/identity/key.go", "identity", "net/http/httptrace")},
		{"admission-knows-no-http", "through a shared package", merge(
			tree("services/edge/admission/decide.go", "admission", archtest.Root+"/pkg/telemetry"),
			tree("pkg/telemetry/admin.go", "telemetry", "net/http"))},
		{"", "http in the proxy", tree("services/edge/proxy/proxy.go", "proxy", "net/http")},
		{"events-know-no-transport", "nats in events", merge(
			tree("pkg/events/x.go", "events", archtest.Root+"/pkg/bus"),
			tree("pkg/bus/bus.go", "bus", "github.com/nats-io/nats.go"))},
		{"policy-knows-no-transport", "http in policy", tree("pkg/policy/x.go", "policy", "net/http")},
		{"nats-behind-bus", "nats in a service", tree("services/settler/consume.go", "settler", "github.com/nats-io/nats.go/jetstream")},
		{"nats-behind-bus", "nats server in a service's test", tree("services/settler/consume_test.go", "settler", "github.com/nats-io/nats-server/v2/server")},
		{"", "nats in the bus's helper", tree("pkg/bus/bustest/server.go", "bustest", "testing", "github.com/nats-io/nats-server/v2/server")},
		{"redis-behind-store", "redis in a service", tree("services/edge/edge.go", "edge", "github.com/redis/go-redis/v9")},
		{"", "redis in its store", tree("pkg/bucket/store/redisstore/store.go", "redisstore", "github.com/redis/go-redis/v9")},
		{"embedded-redis-only-embedded", "miniredis elsewhere", tree("services/edge/edge_test.go", "edge", "github.com/alicebob/miniredis/v2")},
		{"services-apart", "edge imports settler", tree("services/edge/edge.go", "edge", archtest.Root+"/services/settler")},
		{"services-apart", "edge's test imports settler", tree("services/edge/edge_test.go", "edge", archtest.Root+"/services/settler/cost")},
		{"", "edge imports itself", tree("services/edge/edge.go", "edge", archtest.Root+"/services/edge/proxy")},
		{"layers", "pkg imports a service", tree("pkg/bus/bus.go", "bus", archtest.Root+"/services/edge")},
		{"layers", "a service imports the stack", tree("services/edge/edge.go", "edge", archtest.Root+"/cmd/aegis/stack")},
		{"layers", "the command imports e2e", tree("cmd/aegis/main.go", "main", archtest.Root+"/e2e/history")},
		{"mains-own-the-process", "environment in a package", source("pkg/bus/bus.go", `package bus
import "os"
var url = os.Getenv("AEGIS_NATS_URL")`)},
		{"mains-own-the-process", "exit under another name", source("services/edge/edge.go", `package edge
import sys "os"
func stop() { sys.Exit(1) }`)},
		{"mains-own-the-process", "signals in a package", tree("services/edge/edge.go", "edge", "os/signal")},
		{"", "environment in a main", source("cmd/aegis/main.go", `package main
import "os"
func main() { os.Exit(len(os.Getenv("X"))) }`)},
		{"", "environment in a test helper", source("pkg/bucket/store/redistest/start.go", `package redistest
import ("os"; "testing")
func Start(t *testing.T) string { return os.Getenv("AEGIS_TEST_REDIS_URL") }`)},
		{"helpers-in-tests-only", "a helper in a binary", merge(
			tree("pkg/bus/bustest/server.go", "bustest", "testing"),
			tree("cmd/aegis/stack/nats.go", "stack", archtest.Root+"/pkg/bus/bustest"))},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			planted := make(fstest.MapFS)
			for name, text := range c.files {
				planted[name] = &fstest.MapFile{Data: []byte(text)}
			}
			found, err := archtest.Check(planted)
			if err != nil {
				t.Fatal(err)
			}
			if c.rule == "" && len(found) > 0 {
				t.Fatalf("allowed, but found %v", found)
			}
			if c.rule != "" && (len(found) != 1 || found[0].Rule != c.rule) {
				t.Fatalf("found %v, want one violation of %s", found, c.rule)
			}
		})
	}
}

// tree is one source file that imports what is named.
func tree(name, pkg string, imports ...string) map[string]string {
	var b strings.Builder
	fmt.Fprintf(&b, "package %s\n", pkg)
	for _, i := range imports {
		fmt.Fprintf(&b, "import _ %q\n", i)
	}
	return source(name, b.String())
}

func source(name, text string) map[string]string { return map[string]string{name: text} }

func merge(trees ...map[string]string) map[string]string {
	all := make(map[string]string)
	for _, t := range trees {
		for name, text := range t {
			all[name] = text
		}
	}
	return all
}

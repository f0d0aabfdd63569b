package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/e2e/stack"
)

// The stock nats CLI changes the config of every edge with the admin token, and not without.
func TestConfigFromTheNATSCommandLine(t *testing.T) {
	change(t, map[string]quota{"slow": sample})
	list := service(t, "edge", edges)
	const path, key = "/api/slow?ms=0", "demo-enterprise"
	everyEdge(t, list, 5*time.Second, "start", shows(path, key, headerLimit, "20"))

	out, err := natsCLI(t.Context(), "micro", "ls")
	if err != nil || !strings.Contains(out, "aegis-config") {
		t.Fatalf("nats micro ls does not find the service: %v: %s", err, out)
	}

	set := func(capacity int) string { return fmt.Sprintf(`{"routes":{"slow":{"capacity":%d}}}`, capacity) }
	token := []string{"-H", "X-Admin-Token:" + stack.AdminToken}

	for name, header := range map[string][]string{"without a token": nil, "with a wrong one": {"-H", "X-Admin-Token:guess"}} {
		out, err := natsCLI(t.Context(), append([]string{"req", "aegis.config.command", set(9)}, header...)...)
		if err == nil && strings.Contains(out, `"version"`) {
			t.Errorf("%s the change was accepted: %s", name, out)
		}
	}
	out, err = natsCLI(t.Context(), append([]string{"req", "aegis.config.command", `{"routes":{"slow":{"capacty":9}}}`}, token...)...)
	if err == nil && !strings.Contains(out, "capacty") {
		t.Errorf("an unknown key was not named: %s", out)
	}
	everyEdge(t, list, 5*time.Second, "nothing has changed", shows(path, key, headerLimit, "20"))

	// Requests get an answer; a plain publish works as well.
	for i, verb := range []string{"req", "pub"} {
		capacity := 7 + i
		out, err := natsCLI(t.Context(), append([]string{verb, "aegis.config.command", set(capacity)}, token...)...)
		if err != nil {
			t.Fatal(err)
		}
		if verb == "req" && !strings.Contains(out, "routes.slow.capacity") {
			t.Errorf("the answer does not name what changed: %s", out)
		}
		everyEdge(t, list, time.Second, "obey nats "+verb+" within a second", shows(path, key, headerLimit, fmt.Sprint(capacity)))
	}

	// The operator's user cannot go round the service.
	if out, err := natsCLI(t.Context(), append([]string{"req", "aegis.config.updates", set(3)}, token...)...); err == nil && !strings.Contains(strings.ToLower(out), "permissions violation") {
		t.Errorf("published to the config stream: %s", out)
	}
	everyEdge(t, list, time.Second, "still 8", shows(path, key, headerLimit, "8"))
}

// With the controlplane and NATS away, an edge that starts again obeys its last version.
func TestConfigOutlivesControlplaneAndNATS(t *testing.T) {
	change(t, map[string]quota{"slow": {Capacity: 13, RefillRate: 10}})
	list := service(t, "edge", edges)
	const path, key = "/api/slow?ms=0", "demo-enterprise"
	everyEdge(t, list, 5*time.Second, "before", shows(path, key, headerLimit, "13"))

	if _, err := running.Compose(t.Context(), "stop", "--timeout", "10", "controlplane", "nats"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if _, err := running.Compose(t.Context(), "up", "--detach", "--no-build", "--no-recreate", "--wait", "controlplane", "nats"); err != nil {
			t.Error(err)
		}
		everyEdge(t, service(t, "edge", edges), 20*time.Second, "back", obeys(1))
	}()
	kill(t, list[0])
	everyEdge(t, append(list[1:], awaitReturn(t, list[0])), 10*time.Second, "alone", shows(path, key, headerLimit, "13"))
}

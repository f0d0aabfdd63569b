package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/e2e/stack"
)

// plenty is a quota that no test reaches, so that every refusal is a failure.
var plenty = quota{Capacity: 100_000, RefillRate: 10_000}

// kill ends a container's process with SIGKILL.
func kill(t *testing.T, c stack.Container) {
	t.Helper()
	if err := running.Kill(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

// awaitReturn waits until its restart policy has brought a killed container back.
func awaitReturn(t *testing.T, c stack.Container) (returned stack.Container) {
	t.Helper()
	err := stack.Await(t.Context(), 60*time.Second, func(ctx context.Context) (err error) {
		returned, err = running.Look(ctx, c.ID)
		switch {
		case err != nil:
			return err
		case !returned.Started.After(c.Started):
			return errors.New("has not started again")
		case !returned.Healthy:
			return errors.New("is not healthy")
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%s, killed: %v", c.Service, err)
	}
	return returned
}

// mixed alternates safe requests, which the front may try again, and others, which it may not.
func mixed(ctx context.Context, n int) answer {
	method := http.MethodGet
	if n%2 == 1 {
		method = http.MethodPost
	}
	return send(ctx, method, running.Front+"/api/fast", "demo-enterprise")
}

// Each service is killed with -9 in turn. The others go on serving, it returns, and does its job again.
func TestKilledServicesReturn(t *testing.T) {
	change(t, map[string]quota{"fast": plenty, "cost": {Capacity: 1000, RefillRate: 0.01}})

	settles := func(t *testing.T) {
		t.Helper()
		const key = "demo-free"
		if a := get(t, running.Front+"/api/cost?units=1", key); a.status != http.StatusOK {
			t.Fatal(a)
		}
		before, err := tokens(t.Context(), "cost", key)
		if err != nil {
			t.Fatal(err)
		}
		if a := get(t, running.Front+"/api/cost?units=7", key); a.status != http.StatusOK {
			t.Fatal(a)
		}
		awaitTokens(t, "cost", key, before-7, before-6.5)
	}
	ticks := func(t *testing.T) {
		t.Helper()
		last := func() string {
			out, err := natsCLI(t.Context(), "stream", "get", "AEGIS_HEALTH", "--last-for", "aegis.health.sample")
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
		before := last()
		err := stack.Await(t.Context(), 10*time.Second, func(context.Context) error {
			if last() == before {
				return errors.New("no new tick")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	configures := func(t *testing.T) {
		t.Helper()
		change(t, map[string]quota{"slow": {Capacity: 20 + int64(time.Since(epoch).Seconds()), RefillRate: 10}})
	}
	shares := func(t *testing.T) {
		t.Helper()
		everyEdge(t, service(t, "edge", edges), 10*time.Second, "decide with Redis again", shows("/api/fast", "demo-enterprise", headerDegraded, ""))
	}

	// A client in debt, who must still be in debt when Redis has been killed and is back.
	const debtor = "demo-starter"
	if a := get(t, running.Front+"/api/cost?units=1500", debtor); a.status != http.StatusOK {
		t.Fatal(a)
	}
	awaitTokens(t, "cost", debtor, -500, -499)
	remembers := func(t *testing.T) {
		t.Helper()
		awaitTokens(t, "cost", debtor, -500, -499)
		for _, edge := range service(t, "edge", edges) {
			if a := get(t, at(edge, stack.EdgePort, "/api/cost?units=1"), debtor); a.status != http.StatusTooManyRequests {
				t.Errorf("a restart of Redis freed a debtor: %v", a)
			}
		}
	}

	for _, c := range []struct {
		service string
		works   []func(*testing.T)
	}{
		{"edge", nil},
		{"settler", []func(*testing.T){settles}},
		{"healthwatch", []func(*testing.T){ticks}},
		{"controlplane", []func(*testing.T){configures}},
		{"redis", []func(*testing.T){shares, remembers, settles}},
		{"nats", []func(*testing.T){configures, settles, ticks}},
	} {
		t.Run(c.service, func(t *testing.T) {
			replicas := 1
			if c.service == "edge" {
				replicas = edges
			}
			victim := service(t, c.service, replicas)[0]
			const workers = 8
			stop := background(t, 10*time.Millisecond, workers, mixed)
			defer stop()

			kill(t, victim)
			killed := time.Since(epoch)
			returned := awaitReturn(t, victim)
			t.Logf("healthy again after %v", time.Since(epoch)-killed)
			if c.service == "edge" {
				before, err := served(t.Context(), returned, "fast")
				if err != nil {
					t.Fatal(err)
				}
				everyEdge(t, []stack.Container{returned}, 10*time.Second, "gets traffic again", func(ctx context.Context, edge stack.Container) error {
					now, err := served(ctx, edge, "fast")
					if err == nil && now <= before {
						err = errors.New("no request came")
					}
					return err
				})
			}
			for _, works := range c.works {
				works(t)
			}

			answers := stop()
			var failed []string
			inFlight := 0
			for _, a := range answers {
				if a.err == nil && a.status == http.StatusOK {
					continue
				}
				// What the killed edge had in hand is lost where trying again could do it twice: the
				// front answers 502, or closes the connection as the edge did.
				lost := a.status == http.StatusBadGateway || errors.Is(a.err, io.EOF)
				if c.service == "edge" && a.method == http.MethodPost && a.start < killed && lost && inFlight < workers {
					inFlight++
					t.Logf("in flight: %v", a)
					continue
				}
				failed = append(failed, a.String())
			}
			if len(failed) > 0 {
				t.Errorf("%d of %d requests failed while %s was away:\n%s", len(failed), len(answers), c.service, strings.Join(failed[:min(len(failed), 10)], "\n"))
			}
			if len(answers) < 50 {
				t.Errorf("only %d requests: nothing was put to the test", len(answers))
			}
		})
	}
	t.Run("front", func(t *testing.T) {
		victim := service(t, "front", 1)[0]
		kill(t, victim)
		awaitReturn(t, victim)
		if err := stack.Await(t.Context(), 10*time.Second, func(ctx context.Context) error {
			a := mixed(ctx, 0)
			if a.err == nil && a.status != http.StatusOK {
				return fmt.Errorf("%v", a)
			}
			return a.err
		}); err != nil {
			t.Fatal(err)
		}
	})
}

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/e2e/stack"
)

// Headers of the edges.
const (
	headerLimit      = "RateLimit-Limit"
	headerRemaining  = "RateLimit-Remaining"
	headerRetryAfter = "Retry-After"
	headerTier       = "X-RateLimit-Tier"
	headerMultiplier = "X-RateLimit-Adaptive-Multiplier"
	headerDegraded   = "X-RateLimit-Degraded"
)

// epoch is what the times of answers count from, on the monotonic clock.
var epoch = time.Now()

// answer is what a client saw of one request.
type answer struct {
	method     string
	status     int
	header     http.Header
	body       string
	start, end time.Duration
	err        error
}

func (a answer) String() string {
	if a.err != nil {
		return fmt.Sprintf("%s from %v to %v: %v", a.method, a.start, a.end, a.err)
	}
	return fmt.Sprintf("%s from %v to %v: %d %s", a.method, a.start, a.end, a.status, a.body)
}

// number reads a header that must be a whole number.
func (a answer) number(t *testing.T, header string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(a.header.Get(header), 10, 64)
	if err != nil {
		t.Fatalf("%s of %v: %v", header, a, err)
	}
	return n
}

var client = &http.Client{
	Timeout:   20 * time.Second,
	Transport: &http.Transport{MaxIdleConnsPerHost: 64},
}

// send makes one request as the client with that API key.
func send(ctx context.Context, method, url, key string) (a answer) {
	a = answer{method: method, start: time.Since(epoch)}
	defer func() { a.end = time.Since(epoch) }()
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		a.err = err
		return a
	}
	if key != "" {
		req.Header.Set("X-API-Key", key)
	}
	resp, err := client.Do(req)
	if err != nil {
		a.err = err
		return a
	}
	defer resp.Body.Close()
	a.status, a.header = resp.StatusCode, resp.Header
	body, err := io.ReadAll(resp.Body)
	a.body, a.err = strings.TrimSpace(string(body)), err
	return a
}

// get makes one request that must be answered.
func get(t *testing.T, url, key string) answer {
	t.Helper()
	a := send(t.Context(), http.MethodGet, url, key)
	if a.err != nil {
		t.Fatal(a)
	}
	return a
}

// load sends request number 0, 1, 2, … at a steady rate, some at a time, until the context ends.
func load(ctx context.Context, every time.Duration, workers int, request func(ctx context.Context, n int) answer) []answer {
	var (
		wg      sync.WaitGroup
		mu      sync.Mutex
		answers []answer
		turn    = make(chan int)
	)
	for range workers {
		wg.Go(func() {
			for n := range turn {
				// What has begun may end: the context only stops new requests.
				a := request(context.WithoutCancel(ctx), n)
				mu.Lock()
				answers = append(answers, a)
				mu.Unlock()
			}
		})
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			close(turn)
			wg.Wait()
			return answers
		case <-tick.C:
		}
		select {
		case <-ctx.Done():
		case turn <- n:
		}
	}
}

// background runs load beside the test; the function that it returns stops it and gives the answers.
func background(t *testing.T, every time.Duration, workers int, request func(ctx context.Context, n int) answer) (stop func() []answer) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan []answer, 1)
	go func() { done <- load(ctx, every, workers, request) }()
	return sync.OnceValue(func() []answer {
		cancel()
		return <-done
	})
}

// service lists the containers of a service, which must run.
func service(t *testing.T, name string, replicas int) []stack.Container {
	t.Helper()
	list, err := running.Service(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != replicas {
		t.Fatalf("%d containers of %s run, want %d", len(list), name, replicas)
	}
	return list
}

// at is the URL of a path on one container.
func at(c stack.Container, port int, path string) string {
	return "http://" + c.Addr + ":" + strconv.Itoa(port) + path
}

// everyEdge waits until a condition holds on each edge.
func everyEdge(t *testing.T, list []stack.Container, limit time.Duration, what string, condition func(ctx context.Context, edge stack.Container) error) {
	t.Helper()
	err := stack.Await(t.Context(), limit, func(ctx context.Context) error {
		for _, edge := range list {
			if err := condition(ctx, edge); err != nil {
				return fmt.Errorf("edge %s: %w", edge.Hostname, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// shows is the condition that an edge answers a client with a header of that value.
func shows(path, key, header, value string) func(context.Context, stack.Container) error {
	return func(ctx context.Context, edge stack.Container) error {
		a := send(ctx, http.MethodGet, at(edge, stack.EdgePort, path), key)
		if a.err != nil {
			return a.err
		}
		if got := a.header.Get(header); got != value {
			return fmt.Errorf("%s is %q, want %q (%v)", header, got, value, a)
		}
		return nil
	}
}

// quota is a change of one route, as the control plane takes it.
type quota struct {
	Capacity   int64   `json:"capacity"`
	RefillRate float64 `json:"refill_rate"`
}

// sample is the quota of every route in the sample policy.
var sample = quota{Capacity: 20, RefillRate: 10}

// change sets quotas through the HTTP API and waits until every edge obeys.
func change(t *testing.T, routes map[string]quota) {
	t.Helper()
	doc, err := json.Marshal(map[string]any{"routes": routes})
	if err != nil {
		t.Fatal(err)
	}
	version, err := post(t.Context(), doc)
	if err != nil {
		t.Fatal(err)
	}
	list, err := running.Service(t.Context(), "edge")
	if err != nil {
		t.Fatal(err)
	}
	everyEdge(t, list, 10*time.Second, "obey the change", obeys(version))
}

// post sends a change to the HTTP API and gives the version that is in force after it.
func post(ctx context.Context, doc []byte) (version uint64, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, running.Control+"/api/control", bytes.NewReader(doc))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Admin-Token", stack.AdminToken)
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("control: %s: %s", resp.Status, body)
	}
	var reply struct {
		Version uint64 `json:"version"`
	}
	err = json.Unmarshal(body, &reply)
	return reply.Version, err
}

// obeys is the condition that an edge has that version of the config or a later one.
func obeys(version uint64) func(context.Context, stack.Container) error {
	return func(ctx context.Context, edge stack.Container) error {
		got, err := metric(ctx, edge, "aegis_edge_policy_version")
		if err == nil && uint64(got) < version {
			err = fmt.Errorf("obeys version %v, not yet %d", got, version)
		}
		return err
	}
}

// metric reads a metric of an edge, summed over the series that have all those labels
// (written name="value"). What has not been counted yet is 0.
func metric(ctx context.Context, edge stack.Container, name string, labels ...string) (sum float64, err error) {
	a := send(ctx, http.MethodGet, at(edge, stack.EdgeAdminPort, "/metrics"), "")
	if a.err != nil {
		return 0, a.err
	}
lines:
	for line := range strings.Lines(a.body) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
		if !strings.HasPrefix(series, name+"{") {
			continue
		}
		for _, label := range labels {
			if !strings.Contains(series, label) {
				continue lines
			}
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", line, err)
		}
		sum += n
	}
	return sum, nil
}

// served is how many requests to a route an edge has let pass.
func served(ctx context.Context, edge stack.Container, route string) (float64, error) {
	return metric(ctx, edge, "aegis_edge_requests_total", `route="`+route+`"`, `tier="green"`)
}

// tokens reads the balance of a client on a route from Redis, as it was stored last.
func tokens(ctx context.Context, route, user string) (float64, error) {
	const script = `
		local found = redis.call('KEYS', ARGV[1])
		if #found ~= 1 then return redis.error_reply('ERR ' .. #found .. ' buckets match ' .. ARGV[1]) end
		return redis.call('HGET', found[1], 'tokens')`
	out, err := running.Compose(ctx, "exec", "-T", "redis", "redis-cli", "--raw", "EVAL", script, "0", "ratelimit:tb:*:"+route+":*"+user)
	if err != nil {
		return 0, err
	}
	return strconv.ParseFloat(strings.TrimSpace(out), 64)
}

// awaitTokens waits until the stored balance lies between two bounds.
func awaitTokens(t *testing.T, route, user string, low, high float64) {
	t.Helper()
	err := stack.Await(t.Context(), 10*time.Second, func(ctx context.Context) error {
		got, err := tokens(ctx, route, user)
		if err == nil && (got < low || got > high) {
			err = fmt.Errorf("%s has %v tokens on %s, want %v to %v", user, got, route, low, high)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// natsCLI runs the stock nats CLI as the operator.
func natsCLI(ctx context.Context, args ...string) (string, error) {
	cli := os.Getenv("AEGIS_E2E_NATS_CLI")
	if cli == "" {
		return "", errors.New("AEGIS_E2E_NATS_CLI does not say where the nats CLI is: run `make e2e`")
	}
	home := filepath.Join(os.TempDir(), running.Project) // no contexts of whoever runs the tests
	cmd := exec.CommandContext(ctx, cli, append([]string{
		"--server", running.NATS, "--user", "operator", "--password", stack.OperatorPassword, "--timeout", "5s",
	}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+home, "XDG_CONFIG_HOME="+home)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("nats %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

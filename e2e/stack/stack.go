package stack

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
)

// Fixed by deploy/compose.yaml and the sample policy.
const (
	AdminToken       = "demo-admin-token"
	OperatorPassword = "demo-operator"

	EdgePort      = 8080
	EdgeAdminPort = 8081
	UpstreamPort  = 8070
)

// Stack is one running compose project.
type Stack struct {
	// Project names it; networks are <Project>_<network>.
	Project string
	// Front and Control are base URLs, NATS a server URL, all published on loopback.
	Front, Control, NATS string

	root   string
	env    []string
	docker *testcontainers.DockerClient
}

// Start brings the stack up with that many edges and returns when everything is healthy.
// The caller calls Down, also after an error, which may have left half a stack.
func Start(ctx context.Context, edges int) (*Stack, error) {
	root, err := filepath.Abs("..")
	if err != nil {
		return nil, err
	}
	docker, err := testcontainers.NewDockerClientWithOpts(ctx)
	if err != nil {
		return nil, fmt.Errorf("docker does not answer; these tests run through `make e2e`: %w", err)
	}
	s := &Stack{Project: cmp.Or(os.Getenv("AEGIS_E2E_PROJECT"), fmt.Sprintf("aegis-e2e-%d", os.Getpid())), root: root, docker: docker}
	ports, err := freePorts(3)
	if err != nil {
		return s, err
	}
	s.Front = "http://127.0.0.1:" + ports[0]
	s.Control = "http://127.0.0.1:" + ports[1]
	s.NATS = "nats://127.0.0.1:" + ports[2]
	// What the shell or a deploy/.env says must not reach the tests' stack.
	s.env = append(slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "AEGIS_") || strings.HasPrefix(v, "COMPOSE_") || strings.HasPrefix(v, "BIN=")
	}),
		"COMPOSE_PROJECT_NAME="+s.Project,
		"AEGIS_TAG=e2e",
		"AEGIS_HTTP_PORT="+ports[0], "AEGIS_CONTROL_PORT="+ports[1], "AEGIS_NATS_PORT="+ports[2],
		// These tests are about Redis that answers or is gone, not about a machine that runs them slowly.
		"AEGIS_REDIS_TIMEOUT=250ms", "AEGIS_REDIS_POOL_TIMEOUT=250ms",
	)
	// Docker knows best which networks are taken: ask for one until it agrees.
	for try := 0; ; try++ {
		subnet := fmt.Sprintf("AEGIS_FRONT_SUBNET=10.%d.%d.0/24", 200+rand.IntN(50), rand.IntN(256))
		s.env = append(s.env, subnet)
		_, err := s.Compose(ctx, "up", "--detach", "--no-build", "--wait", "--wait-timeout", "120", "--scale", "edge="+strconv.Itoa(edges))
		if err == nil {
			return s, nil
		}
		if try == 5 || !strings.Contains(err.Error(), "overlaps") {
			return s, err
		}
	}
}

// freePorts finds loopback ports that nobody listens on.
func freePorts(n int) (ports []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		// All stay open until all are found, so that no port is found twice.
		defer l.Close()
		_, port, err := net.SplitHostPort(l.Addr().String())
		if err != nil {
			return nil, err
		}
		ports = append(ports, port)
	}
	return ports, nil
}

// Compose runs a compose command on the stack and returns what it printed.
func (s *Stack) Compose(ctx context.Context, args ...string) (string, error) {
	args = append([]string{"--env-file", os.DevNull, "-f", filepath.Join(s.root, "deploy", "compose.yaml"), "--progress", "plain"}, args...)
	cmd := exec.CommandContext(ctx, filepath.Join(s.root, "scripts", "compose.sh"), args...)
	cmd.Env = s.env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("compose %s: %w\n%s", strings.Join(args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}

// Scale changes the number of edges, touches nothing else, and returns when all are healthy.
func (s *Stack) Scale(ctx context.Context, edges int) error {
	_, err := s.Compose(ctx, "up", "--detach", "--no-build", "--no-recreate", "--wait", "--wait-timeout", "60", "--scale", "edge="+strconv.Itoa(edges), "edge")
	return err
}

// Down removes everything that belongs to the stack.
func (s *Stack) Down(ctx context.Context) error {
	if s == nil || s.env == nil {
		return nil
	}
	_, err := s.Compose(ctx, "down", "--volumes", "--remove-orphans", "--timeout", "5")
	return errors.Join(err, s.docker.Close())
}

// Logs is the end of what every service wrote.
func (s *Stack) Logs(ctx context.Context) string {
	out, err := s.Compose(ctx, "logs", "--no-color", "--timestamps", "--tail", "60")
	if err != nil {
		return err.Error()
	}
	return out
}

// Container is one container of the stack, as it was when it was looked at.
type Container struct {
	ID       string
	Service  string
	Hostname string
	// Addr is its address on the network that all services share.
	Addr string
	// PID is its main process as the host sees it; 0 when it does not run.
	PID      int
	Started  time.Time
	Restarts int
	Healthy  bool
}

// Service lists the running containers of a service.
func (s *Stack) Service(ctx context.Context, service string) ([]Container, error) {
	list, err := s.docker.ContainerList(ctx, client.ContainerListOptions{Filters: make(client.Filters).
		Add("label", "com.docker.compose.project="+s.Project).
		Add("label", "com.docker.compose.service="+service)})
	if err != nil {
		return nil, err
	}
	var containers []Container
	for _, item := range list.Items {
		c, err := s.Look(ctx, item.ID)
		if err != nil {
			return nil, err
		}
		containers = append(containers, c)
	}
	return containers, nil
}

// Look looks at one container again.
func (s *Stack) Look(ctx context.Context, id string) (Container, error) {
	r, err := s.docker.ContainerInspect(ctx, id, client.ContainerInspectOptions{})
	if err != nil {
		return Container{}, err
	}
	i := r.Container
	c := Container{ID: i.ID, Service: i.Config.Labels["com.docker.compose.service"], Hostname: i.Config.Hostname, Restarts: i.RestartCount}
	if n := i.NetworkSettings.Networks[s.Project+"_inner"]; n != nil && n.IPAddress.IsValid() {
		c.Addr = n.IPAddress.String()
	}
	if i.State.Running {
		c.PID = i.State.Pid
	}
	c.Healthy = i.State.Running && i.State.Health != nil && i.State.Health.Status == "healthy"
	c.Started, err = time.Parse(time.RFC3339Nano, i.State.StartedAt)
	return c, err
}

// Kill ends a container's main process with SIGKILL, from outside: `docker kill` would count
// as a stop by hand, after which no restart policy applies.
func (s *Stack) Kill(ctx context.Context, c Container) error {
	if c.PID == 0 {
		return fmt.Errorf("kill %s: it does not run", c.Service)
	}
	return s.hostSh(ctx, "kill -9 "+strconv.Itoa(c.PID))
}

// Await polls until the condition holds. When time runs out, the last thing that was wrong is the answer.
func Await(ctx context.Context, limit time.Duration, condition func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var wrong error
	for {
		err := condition(ctx)
		if err == nil {
			return nil
		}
		if wrong == nil || ctx.Err() == nil {
			wrong = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not within %v: %w", limit, wrong)
		case <-tick.C:
		}
	}
}

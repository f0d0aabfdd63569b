package stack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/moby/moby/api/types/container"
	"github.com/testcontainers/testcontainers-go"
	tcexec "github.com/testcontainers/testcontainers-go/exec"
	"github.com/testcontainers/testcontainers-go/wait"
)

// boxImage has a shell and a wget; it is there because the stack uses it.
const boxImage = "nats:2.15.3-alpine"

// Box is a container with a shell, beside the stack.
type Box struct {
	c *testcontainers.DockerContainer
}

// NewBox starts a box on one of the stack's networks: a client with an address of its own.
func (s *Stack) NewBox(ctx context.Context, network string) (*Box, error) {
	c, err := testcontainers.Run(ctx, boxImage,
		testcontainers.WithEntrypoint("sleep"), testcontainers.WithCmd("3600"), s.label(),
		testcontainers.CustomizeRequest(testcontainers.GenericContainerRequest{
			ContainerRequest: testcontainers.ContainerRequest{Networks: []string{s.Project + "_" + network}},
		}))
	if err != nil {
		return nil, errors.Join(err, testcontainers.TerminateContainer(c))
	}
	return &Box{c}, nil
}

// Sh runs a shell command in the box and returns its output, standard error included.
func (b *Box) Sh(ctx context.Context, command string) (string, error) {
	code, out, err := b.c.Exec(ctx, []string{"sh", "-c", command}, tcexec.Multiplexed())
	if err != nil {
		return "", err
	}
	text, err := io.ReadAll(out)
	if err == nil && code != 0 {
		err = fmt.Errorf("%s: exit %d: %s", command, code, strings.TrimSpace(string(text)))
	}
	return string(text), err
}

// Close removes the box.
func (b *Box) Close() error {
	return testcontainers.TerminateContainer(b.c, testcontainers.StopTimeout(0))
}

// label marks what belongs to the stack without being a part of it; scripts/e2e.sh sweeps by it.
func (s *Stack) label() testcontainers.CustomizeRequestOption {
	return testcontainers.WithLabels(map[string]string{"io.aegisrate.e2e": s.Project})
}

// hostSh runs a shell command that sees the host's processes.
func (s *Stack) hostSh(ctx context.Context, command string) error {
	c, err := testcontainers.Run(ctx, boxImage,
		testcontainers.WithEntrypoint("sh"), testcontainers.WithCmd("-c", command), s.label(),
		testcontainers.WithHostConfigModifier(func(h *container.HostConfig) { h.PidMode = "host" }),
		testcontainers.WithWaitStrategy(wait.ForExit()))
	if err != nil {
		return errors.Join(fmt.Errorf("%s: %w", command, err), testcontainers.TerminateContainer(c))
	}
	state, err := c.State(ctx)
	if err == nil && state.ExitCode != 0 {
		err = fmt.Errorf("%s: exit %d", command, state.ExitCode)
	}
	return errors.Join(err, testcontainers.TerminateContainer(c))
}

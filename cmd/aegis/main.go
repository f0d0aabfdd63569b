// Command aegis runs all of AegisRate in one process (aegis up) and is the
// operator's command line.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
)

// version is set by the linker; see the Makefile.
var version = "dev"

type commands struct {
	Up          upCommand          `cmd:"" help:"Run everything in one process: four services, NATS, Redis, a sample upstream."`
	Upstream    upstreamCommand    `cmd:"" help:"Run the sample upstream alone."`
	Policy      policyCommands     `cmd:"" help:"Work with policy files."`
	DeadLetter  deadLetterCommands `cmd:"" name:"deadletter" help:"Look at what could not be settled, and settle it after all."`
	Healthcheck healthcheckCommand `cmd:"" help:"Ask a service's /readyz or /healthz; exit 0 if it is well."`
	Version     versionCommand     `cmd:"" help:"Print the version."`
}

func main() {
	// Ctrl-C stops in order; a second one finds the default handler and ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	defer stop()

	cli := kong.Parse(new(commands),
		kong.Name("aegis"),
		kong.Description("AegisRate: an event-sourced, distributed rate-limiting gateway."),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true}),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.ShortUsageOnError(),
	)
	if err := cli.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "aegis:", err)
		os.Exit(1)
	}
}

type versionCommand struct{}

func (versionCommand) Run() error {
	fmt.Println("aegis", version)
	return nil
}

// Command aegis runs all of AegisRate in one process (aegis up) and is the
// operator's command line.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
	kongcompletion "github.com/jotaen/kong-completion"
)

// version is set by the linker; see the Makefile.
var version = "dev"

type commands struct {
	Remote remote `embed:""`

	Up          upCommand                 `cmd:"" group:"run" help:"Run everything in one process: four services, NATS, Redis, a sample upstream."`
	Upstream    upstreamCommand           `cmd:"" group:"run" help:"Run the sample upstream alone."`
	Healthcheck healthcheckCommand        `cmd:"" group:"run" help:"Ask a service's /readyz or /healthz; exit 0 if it is well."`
	Validate    validateCommand           `cmd:"" group:"files" help:"Check a policy file; lists every problem with its path and line."`
	Policy      policyCommands            `cmd:"" group:"files" help:"The sample policy, its JSON Schema, and the public key of signed versions."`
	Apply       applyCommand              `cmd:"" group:"config" help:"Put a policy file in force."`
	Get         getCommand                `cmd:"" group:"config" help:"Print the policy in force, or an earlier version."`
	Diff        diffCommand               `cmd:"" group:"config" help:"Show what differs between two versions, or what a file would change."`
	History     historyCommand            `cmd:"" group:"config" help:"List the versions of the policy."`
	Rollback    rollbackCommand           `cmd:"" group:"config" help:"Put an earlier version in force again."`
	Route       routeCommands             `cmd:"" group:"config" help:"Routes: list, get, set, add, delete."`
	Plan        planCommands              `cmd:"" group:"rules" help:"Plans: list, set, delete."`
	User        userCommands              `cmd:"" group:"rules" help:"Users: list, get, create, set, delete, override, unoverride."`
	Key         keyCommands               `cmd:"" group:"rules" help:"API keys: list, create, delete."`
	Client      clientCommands            `cmd:"" group:"clients" help:"Single clients: show, reset, grant, raise, block, unblock."`
	DeadLetter  deadLetterCommands        `cmd:"" name:"deadletter" group:"watch" help:"Look at what could not be settled, and settle it after all."`
	Top         topCommand                `cmd:"" group:"watch" help:"Watch edges and upstreams live."`
	Doctor      doctorCommand             `cmd:"" group:"watch" help:"Check connections, permissions, versions, streams, Redis and clocks, and say what to do."`
	Completion  kongcompletion.Completion `cmd:"" help:"Print a completion script for this shell: source <(aegis completion -c bash)."`
	Version     versionCommand            `cmd:"" help:"Print the version."`
}

// Exit codes, as docs/operations.md lists them.
const (
	exitOK = iota
	exitFailed
	exitUsage
	exitInvalid
	exitDenied
	exitNotFound
	exitConflict
	exitUnavailable
)

// exitError is an error with an exit code of its own.
type exitError struct {
	code int
	error
}

func main() {
	// Ctrl-C stops in order; a second one finds the default handler and ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run runs one command and gives the exit code.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	cli := new(commands)
	helped := false
	k, err := kong.New(cli,
		kong.Name("aegis"),
		kong.Description("AegisRate: an event-sourced, distributed rate-limiting gateway."),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true}),
		kong.ExplicitGroups([]kong.Group{
			{Key: "run", Title: "Run"}, {Key: "files", Title: "Policy files"}, {Key: "config", Title: "The policy in force"},
			{Key: "rules", Title: "Users, keys and plans"}, {Key: "clients", Title: "Clients"}, {Key: "watch", Title: "Watch"},
			{Key: "remote", Title: "Where the controlplane is"},
		}),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(&cli.Remote),
		kong.Writers(stdout, stderr),
		kong.Exit(func(int) { helped = true }),
	)
	if err != nil {
		fmt.Fprintln(stderr, "aegis:", err)
		return exitFailed
	}
	kongcompletion.Register(k)
	parsed, err := k.Parse(args)
	if helped {
		return exitOK
	}
	if err != nil {
		fmt.Fprintf(stderr, "aegis: %v (aegis --help)\n", err)
		return exitUsage
	}
	cli.Remote.out, cli.Remote.errs, cli.Remote.getenv = stdout, stderr, getenv
	err = parsed.Run()
	var own exitError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &own):
		fmt.Fprintln(stderr, "aegis:", own)
		return own.code
	default:
		fmt.Fprintln(stderr, "aegis:", err)
		return exitFailed
	}
}

type versionCommand struct{}

func (versionCommand) Run(r *remote) error {
	return r.show(map[string]string{"version": version}, func(w io.Writer) { fmt.Fprintln(w, "aegis", version) })
}

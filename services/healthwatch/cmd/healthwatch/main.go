// Command healthwatch turns what upstreams did into what their routes may take.
package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/lifecycle"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
	"github.com/aegisrate/aegisrate/services/healthwatch"
)

type commands struct {
	Run         runCommand         `cmd:"" default:"withargs" help:"Watch until stopped (the default)."`
	Healthcheck healthcheckCommand `cmd:"" help:"Ask the healthwatch on this machine whether it is ready; exit 0 if so."`
}

func main() {
	// A second signal finds the default handler and ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	defer stop()

	cli := kong.Parse(new(commands),
		kong.Name("healthwatch"),
		kong.Description("AegisRate's healthwatch: scales the limits of routes by how their upstreams do."),
		kong.BindTo(ctx, (*context.Context)(nil)),
	)
	if err := cli.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "healthwatch:", err)
		os.Exit(1)
	}
}

type runCommand struct {
	Healthwatch healthwatch.Config `embed:""`
	NATS        bus.Config         `embed:""`
	AdminAddr   string             `name:"admin-addr" env:"AEGIS_ADMIN_ADDR" default:"127.0.0.1:8083" help:"Where /healthz, /readyz and /metrics are served."`
	LogLevel    string             `name:"log-level" env:"AEGIS_LOG_LEVEL" default:"info" enum:"debug,info,warn,error" help:"Least level to log: debug, info, warn or error."`
	LogFormat   string             `name:"log-format" env:"AEGIS_LOG_FORMAT" default:"json" enum:"json,console" help:"json or console."`
}

func (c *runCommand) Run(ctx context.Context) error {
	c.NATS.Secrets(os.Getenv)
	log, err := telemetry.NewLogger(os.Stderr, c.LogLevel, c.LogFormat, "healthwatch")
	if err != nil {
		return err
	}
	if c.Healthwatch.Name == "" {
		if c.Healthwatch.Name, err = os.Hostname(); err != nil {
			return fmt.Errorf("name: not set, and the host has no name: %w", err)
		}
	}
	c.NATS.Name = "healthwatch"
	b, err := bus.Connect(ctx, c.NATS, log)
	if err != nil {
		return err
	}
	defer b.Close()

	reg := telemetry.NewRegistry("healthwatch")
	service, err := healthwatch.New(c.Healthwatch, healthwatch.Deps{Bus: b, Log: log, Registry: reg})
	if err != nil {
		return err
	}
	admin := telemetry.NewAdmin(c.AdminAddr, reg, log)
	admin.AddReadiness("watch", service.Ready)
	return lifecycle.Run(ctx,
		lifecycle.Component{Name: "admin", Run: admin.Run, Ready: admin.Ready},
		lifecycle.Component{Name: "healthwatch", Run: service.Run},
	)
}

type healthcheckCommand struct {
	URL       string `arg:"" optional:"" help:"What to ask instead."`
	AdminAddr string `name:"admin-addr" env:"AEGIS_ADMIN_ADDR" default:"127.0.0.1:8083" help:"The healthwatch's admin address."`
}

func (c *healthcheckCommand) Run() error {
	return telemetry.Healthcheck(cmp.Or(c.URL, "http://"+c.AdminAddr+"/readyz"))
}

// Command controlplane takes changes of the policy and tells the state of the system.
package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/redisstore"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/lifecycle"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
	"github.com/aegisrate/aegisrate/services/controlplane"
)

type commands struct {
	Run         runCommand         `cmd:"" default:"withargs" help:"Serve (the default)."`
	Healthcheck healthcheckCommand `cmd:"" help:"Ask the controlplane on this machine whether it is ready; exit 0 if so."`
}

func main() {
	// A second signal finds the default handler and ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	defer stop()

	cli := kong.Parse(new(commands),
		kong.Name("controlplane"),
		kong.Description("AegisRate's controlplane: takes changes of the policy and tells the state of the system."),
		kong.BindTo(ctx, (*context.Context)(nil)),
	)
	if err := cli.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "controlplane:", err)
		os.Exit(1)
	}
}

type runCommand struct {
	Controlplane controlplane.Config `embed:""`
	NATS         bus.Config          `embed:""`
	Redis        redisstore.Options  `embed:""`
	AdminAddr    string              `name:"admin-addr" env:"AEGIS_ADMIN_ADDR" default:"127.0.0.1:8084" help:"Where /healthz, /readyz and /metrics are served."`
	LogLevel     string              `name:"log-level" env:"AEGIS_LOG_LEVEL" default:"info" enum:"debug,info,warn,error" help:"Least level to log: debug, info, warn or error."`
	LogFormat    string              `name:"log-format" env:"AEGIS_LOG_FORMAT" default:"json" enum:"json,console" help:"json or console."`
}

func (c *runCommand) Run(ctx context.Context) error {
	c.NATS.Secrets(os.Getenv)
	c.Redis.Secrets(os.Getenv)
	log, err := telemetry.NewLogger(os.Stderr, c.LogLevel, c.LogFormat, "controlplane")
	if err != nil {
		return err
	}
	c.NATS.Name, c.Controlplane.AdminToken = "controlplane", os.Getenv(controlplane.TokenEnv)
	c.Controlplane.ConfigKey = os.Getenv(controlplane.ConfigKeyEnv)
	b, err := bus.Connect(ctx, c.NATS, log)
	if err != nil {
		return err
	}
	defer b.Close()

	store, err := redisstore.New(c.Redis)
	if err != nil {
		return err
	}
	defer store.Close()

	reg := telemetry.NewRegistry("controlplane")
	service, err := controlplane.New(c.Controlplane, controlplane.Deps{Bus: b, Store: store, Log: log, Registry: reg})
	if err != nil {
		return err
	}
	admin := telemetry.NewAdmin(c.AdminAddr, reg, log)
	admin.AddReadiness("config", service.Ready)
	return lifecycle.Run(ctx,
		lifecycle.Component{Name: "admin", Run: admin.Run, Ready: admin.Ready},
		lifecycle.Component{Name: "controlplane", Run: service.Run, Stop: c.Controlplane.StopTimeout()},
	)
}

type healthcheckCommand struct {
	URL       string `arg:"" optional:"" help:"What to ask instead."`
	AdminAddr string `name:"admin-addr" env:"AEGIS_ADMIN_ADDR" default:"127.0.0.1:8084" help:"The controlplane's admin address."`
}

func (c *healthcheckCommand) Run() error {
	return telemetry.Healthcheck(cmp.Or(c.URL, "http://"+c.AdminAddr+"/readyz"))
}

// Command edge is the gateway replica: it admits requests and proxies them.
package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/redisstore"
	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/lifecycle"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
	"github.com/aegisrate/aegisrate/services/edge"
)

type commands struct {
	Run         runCommand         `cmd:"" default:"withargs" help:"Serve (the default)."`
	Healthcheck healthcheckCommand `cmd:"" help:"Ask the edge on this machine whether it is ready; exit 0 if so."`
}

func newCommands() *commands {
	return &commands{Run: runCommand{NATS: bus.Config{Name: "edge"}}}
}

func main() {
	// A second signal finds the default handler and ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	defer stop()

	cli := kong.Parse(newCommands(),
		kong.Name("edge"),
		kong.Description("AegisRate's edge: admits requests by their limits and proxies them."),
		kong.BindTo(ctx, (*context.Context)(nil)),
	)
	if err := cli.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "edge:", err)
		os.Exit(1)
	}
}

type runCommand struct {
	Edge      edge.Config        `embed:""`
	NATS      bus.Config         `embed:""`
	Redis     redisstore.Options `embed:""`
	AdminAddr string             `name:"admin-addr" env:"AEGIS_ADMIN_ADDR" default:"127.0.0.1:8081" help:"Where /healthz, /readyz and /metrics are served."`
	LogLevel  string             `name:"log-level" env:"AEGIS_LOG_LEVEL" default:"info" enum:"debug,info,warn,error" help:"Least level to log: debug, info, warn or error."`
	LogFormat string             `name:"log-format" env:"AEGIS_LOG_FORMAT" default:"json" enum:"json,console" help:"json or console."`
}

func (c *runCommand) Run(ctx context.Context) error {
	c.NATS.Secrets(os.Getenv)
	c.Redis.Secrets(os.Getenv)
	log, err := telemetry.NewLogger(os.Stderr, c.LogLevel, c.LogFormat, "edge")
	if err != nil {
		return err
	}
	store, err := redisstore.New(c.Redis)
	if err != nil {
		return err
	}
	defer store.Close()
	b, err := bus.Connect(ctx, c.NATS, log)
	if err != nil {
		return err
	}
	defer b.Close()

	reg := telemetry.NewRegistry("edge")
	service, err := edge.New(c.Edge, edge.Deps{Bus: b, Store: store, Ping: store.Ping, Counter: store.Counter, Log: log, Registry: reg})
	if err != nil {
		return err
	}
	admin := telemetry.NewAdmin(c.AdminAddr, reg, log)
	admin.AddReadiness("edge", service.Ready)
	return lifecycle.Run(ctx,
		lifecycle.Component{Name: "admin", Run: admin.Run, Ready: admin.Ready},
		lifecycle.Component{Name: "edge", Run: service.Run, Stop: c.Edge.StopTimeout() + time.Second},
	)
}

type healthcheckCommand struct {
	URL       string `arg:"" optional:"" help:"What to ask instead."`
	AdminAddr string `name:"admin-addr" env:"AEGIS_ADMIN_ADDR" default:"127.0.0.1:8081" help:"The edge's admin address."`
}

func (c *healthcheckCommand) Run() error {
	return telemetry.Healthcheck(cmp.Or(c.URL, "http://"+c.AdminAddr+"/readyz"))
}

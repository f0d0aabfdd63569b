// Command settler makes buckets pay what their requests really cost.
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
	"github.com/aegisrate/aegisrate/services/settler"
)

type commands struct {
	Run         runCommand         `cmd:"" default:"withargs" help:"Settle until stopped (the default)."`
	Healthcheck healthcheckCommand `cmd:"" help:"Ask the settler on this machine whether it is ready; exit 0 if so."`
}

func main() {
	// A second signal finds the default handler and ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	defer stop()

	cli := kong.Parse(new(commands),
		kong.Name("settler"),
		kong.Description("AegisRate's settler: makes buckets pay what their requests really cost."),
		kong.BindTo(ctx, (*context.Context)(nil)),
	)
	if err := cli.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "settler:", err)
		os.Exit(1)
	}
}

type runCommand struct {
	Settler   settler.Config     `embed:""`
	NATS      bus.Config         `embed:""`
	Redis     redisstore.Options `embed:""`
	AdminAddr string             `name:"admin-addr" env:"AEGIS_ADMIN_ADDR" default:"127.0.0.1:8082" help:"Where /healthz, /readyz and /metrics are served."`
	LogLevel  string             `name:"log-level" env:"AEGIS_LOG_LEVEL" default:"info" enum:"debug,info,warn,error" help:"Least level to log: debug, info, warn or error."`
	LogFormat string             `name:"log-format" env:"AEGIS_LOG_FORMAT" default:"json" enum:"json,console" help:"json or console."`
}

// patience is the least that Redis is given for a settlement: unlike a check, no
// client waits for it, and a shard that times out is read again from its cursor.
const patience = 500 * time.Millisecond

func (c *runCommand) Run(ctx context.Context) error {
	c.NATS.Secrets(os.Getenv)
	c.Redis.Secrets(os.Getenv)
	log, err := telemetry.NewLogger(os.Stderr, c.LogLevel, c.LogFormat, "settler")
	if err != nil {
		return err
	}
	c.Redis.Timeout = max(c.Redis.Timeout, patience)
	c.Redis.PoolTimeout = max(c.Redis.PoolTimeout, patience)
	store, err := redisstore.New(c.Redis)
	if err != nil {
		return err
	}
	defer store.Close()
	c.NATS.Name = "settler"
	b, err := bus.Connect(ctx, c.NATS, log)
	if err != nil {
		return err
	}
	defer b.Close()

	reg := telemetry.NewRegistry("settler")
	service, err := settler.New(c.Settler, settler.Deps{Bus: b, Store: store, Log: log, Registry: reg})
	if err != nil {
		return err
	}
	admin := telemetry.NewAdmin(c.AdminAddr, reg, log)
	admin.AddReadiness("settlement", service.Ready)
	return lifecycle.Run(ctx,
		lifecycle.Component{Name: "admin", Run: admin.Run, Ready: admin.Ready},
		lifecycle.Component{Name: "settler", Run: service.Run},
	)
}

type healthcheckCommand struct {
	URL       string `arg:"" optional:"" help:"What to ask instead."`
	AdminAddr string `name:"admin-addr" env:"AEGIS_ADMIN_ADDR" default:"127.0.0.1:8082" help:"The settler's admin address."`
}

func (c *healthcheckCommand) Run() error {
	return telemetry.Healthcheck(cmp.Or(c.URL, "http://"+c.AdminAddr+"/readyz"))
}

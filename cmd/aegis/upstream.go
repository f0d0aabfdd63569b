package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/aegisrate/aegisrate/cmd/aegis/upstream"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
)

type upstreamCommand struct {
	Addr      string `name:"addr" env:"AEGIS_UPSTREAM_ADDR" default:"127.0.0.1:8070" help:"Where to listen."`
	LogLevel  string `name:"log-level" env:"AEGIS_LOG_LEVEL" default:"info" enum:"debug,info,warn,error" help:"Least level to log: debug, info, warn or error."`
	LogFormat string `name:"log-format" env:"AEGIS_LOG_FORMAT" default:"json" enum:"json,console" help:"json or console."`
}

func (c *upstreamCommand) Help() string {
	return `It answers /api/fast at once, /api/slow?ms=N after N milliseconds, /api/fail?status=N&rate=0..1 with that status to that
share of requests, and /api/cost?units=N with X-Compute-Cost: N. Below /v1 it is an OpenAI-compatible API with the models
sample-small and sample-large: chat completions, streaming too, with usage. To break all of them at once:

  curl -X POST -d '{"latency_ms": 900, "error_rate": 0.5}' http://ADDR/_control     ({} mends it)

/healthz is fine whatever the faults.`
}

func (c *upstreamCommand) Run(ctx context.Context) error {
	log, err := telemetry.NewLogger(os.Stderr, c.LogLevel, c.LogFormat, "upstream")
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", c.Addr)
	if err != nil {
		return fmt.Errorf("--addr: %w", err)
	}
	log.Info().Str("addr", l.Addr().String()).Msg("serving")
	return telemetry.Serve(ctx, telemetry.NewHTTPServer(upstream.New(), log), l, 5*time.Second)
}

type healthcheckCommand struct {
	URL string `arg:"" optional:"" default:"http://127.0.0.1:8070/healthz" help:"What to ask; by default, the sample upstream's health."`
}

func (c *healthcheckCommand) Run() error { return telemetry.Healthcheck(c.URL) }

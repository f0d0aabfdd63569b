package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/aegisrate/aegisrate/cmd/aegis/stack"
	"github.com/aegisrate/aegisrate/pkg/telemetry"
)

type upCommand struct {
	stack.Config `embed:""`
	LogLevel     string `name:"log-level" env:"AEGIS_LOG_LEVEL" default:"warn" enum:"debug,info,warn,error" help:"Least level to log: debug, info, warn or error."`
	LogFormat    string `name:"log-format" env:"AEGIS_LOG_FORMAT" default:"console" enum:"json,console" help:"json or console."`
}

func (c *upCommand) Help() string {
	return `Everything is real: the services talk over an embedded NATS server (JetStream on disk, below --data-dir), and
buckets live in a private redis-server where one is on PATH, else in an embedded stand-in.

Ctrl-C stops in order: requests end, their events are published and settled, then the services, NATS and Redis end.
A second Ctrl-C ends at once.

With AEGIS_ADMIN_TOKEN (or --token-file) every change must carry that token; without, only this machine may change anything.`
}

func (c *upCommand) Run(ctx context.Context, r *remote) error {
	log, err := telemetry.NewLogger(os.Stderr, c.LogLevel, c.LogFormat, "aegis")
	if err != nil {
		return err
	}
	c.Config.Log = log
	if c.Config.AdminToken, err = r.token(); err != nil {
		return err
	}
	s, err := stack.Start(ctx, c.Config)
	if errors.Is(err, context.Canceled) {
		return nil // stopped while it started
	}
	if err != nil {
		return err
	}
	describe(os.Stdout, c.Config, s)

	select {
	case <-ctx.Done():
		fmt.Println("\nStopping: ending requests, publishing and settling what they cost ... (Ctrl-C again ends at once)")
		again := make(chan os.Signal, 1)
		signal.Notify(again, os.Interrupt, syscall.SIGTERM)
		go func() {
			<-again
			s.Abort()
			os.Exit(130)
		}()
		if err := s.Wait(); err != nil {
			return err
		}
		fmt.Println("Stopped; everything is settled.")
		return nil
	case <-s.Done():
		return s.Wait()
	}
}

// describe prints what runs where, and what to try.
func describe(w io.Writer, cfg stack.Config, s *stack.Stack) {
	about, redisAddr := s.Redis()
	edge, control := s.Edges()[0], s.Controlplane()
	fmt.Fprintf(w, `AegisRate is up.

  edge           http://%s     what clients call; health and metrics on http://%s
  controlplane   http://%s     changes (%s); health on http://%s
  settler, healthwatch: health and metrics on http://%s, http://%s
  NATS           %s     (nats stream ls; nats micro ls)
  Redis          %s     %s
  upstream       http://%s     the sample: /api/fast, /api/slow?ms=N, /api/fail?status=N, /api/cost?units=N, /v1 as an LLM
  data           %s

`, edge.Addr(), edge.AdminAddr(), control.Addr(), gate(cfg), control.AdminAddr(),
		s.Settler().AdminAddr(), s.Healthwatch().AdminAddr(), s.NATSURL(), redisAddr, about, s.UpstreamAddr(), cfg.DataDir)
	if v := s.ReusedPolicy(); v > 0 {
		fmt.Fprintf(w, "Policy version %d from the data directory is in force.", v)
		if cfg.Policy != "" {
			fmt.Fprintf(w, " --policy %s is not used: it is imported only where there is none yet (take another --data-dir).", cfg.Policy)
		}
		fmt.Fprint(w, "\n\n")
	}
	token := ""
	if cfg.AdminToken != "" {
		token = ` -H "X-Admin-Token: $AEGIS_ADMIN_TOKEN"`
	}
	fmt.Fprint(w, "Try, in another terminal:\n\n")
	for _, line := range []string{
		fmt.Sprintf(`curl -i http://%s/api/fast`, edge.Addr()),
		fmt.Sprintf(`seq 60 | xargs -P 8 -I{} curl -s -o /dev/null -w '%%{http_code}\n' http://%s/api/fast | sort | uniq -c`, edge.Addr()),
		fmt.Sprintf(`curl -i -H 'X-API-Key: demo-growth' 'http://%s/api/cost?units=10'`, edge.Addr()),
		fmt.Sprintf(`curl -X POST -H 'Content-Type: application/json'%s -d '{"routes":{"fast":{"capacity":5,"refill_rate":1}}}' http://%s/api/control`, token, control.Addr()),
	} {
		fmt.Fprintf(w, "  %s\n", line)
	}
	fmt.Fprint(w, "\nCtrl-C stops.\n")
}

func gate(cfg stack.Config) string {
	if cfg.AdminToken != "" {
		return "with the token of AEGIS_ADMIN_TOKEN"
	}
	return "from this machine only; set AEGIS_ADMIN_TOKEN to ask for a token"
}

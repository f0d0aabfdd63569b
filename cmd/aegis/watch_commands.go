package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

type topCommand struct {
	Every time.Duration `name:"every" default:"1s" help:"How often to look."`
	Once  bool          `name:"once" help:"Look once."`
}

type status struct {
	Connected bool `json:"connected"`
	Config    *struct {
		Version uint64    `json:"version"`
		By      string    `json:"by"`
		Via     string    `json:"via"`
		Time    time.Time `json:"time"`
	} `json:"config"`
	Upstreams []struct {
		Upstream   string    `json:"upstream"`
		Multiplier float64   `json:"multiplier"`
		Stale      bool      `json:"stale"`
		P95Ms      float64   `json:"p95_ms"`
		ErrorRate  float64   `json:"error_rate"`
		Samples    int       `json:"samples"`
		Tick       uint64    `json:"tick"`
		Time       time.Time `json:"time"`
	} `json:"upstreams"`
	Edges []struct {
		Edge       string  `json:"edge"`
		Config     uint64  `json:"config"`
		Degraded   bool    `json:"degraded"`
		Green      uint64  `json:"green"`
		Yellow     uint64  `json:"yellow"`
		Red        uint64  `json:"red"`
		Queued     int     `json:"queued"`
		Lost       uint64  `json:"lost"`
		Alive      bool    `json:"alive"`
		AgeSeconds float64 `json:"age_seconds"`
	} `json:"edges"`
}

func (c *topCommand) Run(ctx context.Context, r *remote) error {
	if c.Every <= 0 {
		return exitError{exitUsage, errors.New("--every: want more than 0")}
	}
	tick := time.NewTicker(c.Every)
	defer tick.Stop()
	for {
		var s status
		err := r.request(ctx, http.MethodGet, "/api/status", nil, nil, &s)
		if ctx.Err() != nil {
			return nil
		}
		if c.Once && err != nil {
			return err
		}
		var frame bytes.Buffer
		if !c.Once && !r.JSON {
			frame.WriteString("\x1b[H\x1b[J") // home, and clear what is below
		}
		screen := *r
		screen.out = &frame
		if err != nil { // it may come back
			fmt.Fprintln(&frame, "no answer:", err)
		} else if err := screen.show(s, s.write); err != nil {
			return err
		}
		if _, err := r.out.Write(frame.Bytes()); err != nil || c.Once {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (s status) write(w io.Writer) {
	fmt.Fprintf(w, "%s\tNATS %s", time.Now().Format(time.TimeOnly), map[bool]string{true: "connected", false: "AWAY: what follows is old"}[s.Connected])
	if s.Config != nil {
		fmt.Fprintf(w, "\tconfig version %d by %s via %s", s.Config.Version, s.Config.By, s.Config.Via)
	}
	fmt.Fprintln(w, "\n\nEDGE\tSTATE\tCONFIG\tGREEN/S\tYELLOW/S\tRED/S\tQUEUED\tLOST")
	for _, e := range s.Edges {
		state := "alive"
		switch {
		case !e.Alive:
			state = fmt.Sprintf("silent for %.0f s", e.AgeSeconds)
		case e.Degraded:
			state = "degraded"
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\n", e.Edge, state, e.Config, e.Green, e.Yellow, e.Red, e.Queued, e.Lost)
	}
	fmt.Fprintln(w, "\nUPSTREAM\tM\tP95\tERRORS\tSAMPLES\tTICK")
	for _, u := range s.Upstreams {
		m := fmt.Sprintf("%.2f", u.Multiplier)
		if u.Stale {
			m = "1 (no ticks)"
		}
		fmt.Fprintf(w, "%s\t%s\t%.0f ms\t%.1f %%\t%d\t%d\n", u.Upstream, m, u.P95Ms, 100*u.ErrorRate, u.Samples, u.Tick)
	}
}

type doctorCommand struct{}

type finding struct {
	Check  string `json:"check"`
	Level  string `json:"level"`
	Detail string `json:"detail"`
	Advice string `json:"advice,omitempty"`
}

func (doctorCommand) Run(ctx context.Context, r *remote) error {
	var reply struct {
		Time     time.Time `json:"time"`
		Findings []finding `json:"findings"`
	}
	begin := time.Now()
	err := r.request(ctx, http.MethodGet, "/api/doctor", nil, nil, &reply)
	var own exitError
	switch {
	case err == nil:
		reply.Findings = append([]finding{{Check: "controlplane", Level: "ok", Detail: "it answers at " + r.Server}}, reply.Findings...)
		// The answer's clock was read somewhere between asking and hearing.
		skew := time.Since(reply.Time) - time.Since(begin)/2
		clock := finding{Check: "clock", Level: "ok", Detail: fmt.Sprintf("%v from the controlplane's", skew.Round(time.Millisecond))}
		if skew.Abs() > 2*time.Second {
			clock.Level, clock.Advice = "warn", "run NTP on both machines; expiry times are reckoned by the controlplane"
		}
		reply.Findings = append(reply.Findings, clock)
	case errors.As(err, &own):
		advice := map[int]string{
			exitDenied:      "set AEGIS_ADMIN_TOKEN or --token-file to the controlplane's token",
			exitUnavailable: "start the controlplane, or look at --server; with nats:// also at --nats-user and its password",
		}[own.code]
		reply.Findings = []finding{{Check: "controlplane", Level: "fail", Detail: own.Error(), Advice: advice}}
	default:
		return err
	}
	failed := 0
	if err := r.show(reply, func(w io.Writer) {
		for _, f := range reply.Findings {
			fmt.Fprintf(w, "%s\t%s\t%s\n", f.Level, f.Check, f.Detail)
			if f.Advice != "" {
				fmt.Fprintf(w, "\t\t→ %s\n", f.Advice)
			}
		}
	}); err != nil {
		return err
	}
	for _, f := range reply.Findings {
		if f.Level == "fail" {
			failed++
		}
	}
	if own.error != nil {
		return own
	}
	if failed > 0 {
		return fmt.Errorf("%d checks failed", failed)
	}
	return nil
}

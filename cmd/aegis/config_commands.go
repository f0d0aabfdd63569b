package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// changing are the flags of commands that make a version.
type changing struct {
	DryRun  bool   `name:"dry-run" help:"Only show what would change."`
	IfMatch uint64 `name:"if-match" placeholder:"VERSION" help:"Fail unless this version is in force."`
}

// send makes a change and shows what it did.
func (c changing) send(ctx context.Context, r *remote, method, path string, header map[string]string, body any) error {
	if header == nil {
		header = map[string]string{}
	}
	if c.IfMatch > 0 {
		header["If-Match"] = strconv.FormatUint(c.IfMatch, 10)
	}
	if c.DryRun {
		path += "?dry_run=true"
	}
	var reply events.ConfigReply
	if err := r.request(ctx, method, path, header, body, &reply); err != nil {
		return err
	}
	return r.show(reply, func(w io.Writer) {
		switch {
		case len(reply.Diff) == 0:
			fmt.Fprintf(w, "Nothing to change in version %d.\n", reply.Version)
			return
		case reply.DryRun:
			fmt.Fprintf(w, "Would change version %d:\n", reply.Version)
		default:
			fmt.Fprintf(w, "Version %d is in force:\n", reply.Version)
		}
		writeDiff(w, reply.Diff)
	})
}

func writeDiff(w io.Writer, diff []policy.Difference) {
	for _, d := range diff {
		fmt.Fprintf(w, "  %s\n", d)
	}
}

type applyCommand struct {
	changing
	File string `name:"file" short:"f" required:"" help:"Policy in YAML or JSON; - reads standard input."`
}

func (c *applyCommand) Run(ctx context.Context, r *remote) error {
	doc, err := checkedFile(c.File)
	if err != nil {
		return err
	}
	return c.send(ctx, r, http.MethodPut, "/api/config", nil, doc)
}

// checkedFile reads a policy file as JSON, after the checks that need no controlplane: those name lines.
func checkedFile(name string) ([]byte, error) {
	doc, err := readFile(name)
	if err != nil {
		return nil, err
	}
	p, err := policy.Parse(doc)
	if err != nil {
		return nil, exitError{exitInvalid, fmt.Errorf("%s: %w", name, err)}
	}
	return policy.Encode(p)
}

type getCommand struct {
	Version uint64 `arg:"" optional:"" help:"An earlier version."`
}

func (c *getCommand) Run(ctx context.Context, r *remote) error {
	v, _, err := inForce(ctx, r, c.Version)
	if err != nil {
		return err
	}
	if !r.JSON { // the document alone, so that it can be edited and applied
		var doc any
		if err := json.Unmarshal(v.Document, &doc); err != nil {
			return err
		}
		e := json.NewEncoder(r.out)
		e.SetIndent("", "  ")
		return e.Encode(doc)
	}
	return r.show(v, nil)
}

// inForce is a version and its policy; 0 is the one in force.
func inForce(ctx context.Context, r *remote, version uint64) (events.ConfigVersion, policy.Policy, error) {
	path := "/api/config"
	if version > 0 {
		path += "/versions/" + strconv.FormatUint(version, 10)
	}
	var v events.ConfigVersion
	if err := r.request(ctx, http.MethodGet, path, nil, nil, &v); err != nil {
		return v, policy.Policy{}, err
	}
	p, _, err := policy.Receive(v.Document)
	return v, p, err
}

type diffCommand struct {
	From uint64 `arg:"" optional:"" help:"Default: the version before the other."`
	To   uint64 `arg:"" optional:"" help:"Default: the version in force."`
	File string `name:"file" short:"f" help:"Show what putting this file in force would change."`
}

func (c *diffCommand) Run(ctx context.Context, r *remote) error {
	if c.File != "" {
		return (&applyCommand{changing{DryRun: true}, c.File}).Run(ctx, r)
	}
	var q []string
	for name, v := range map[string]uint64{"from": c.From, "to": c.To} {
		if v > 0 {
			q = append(q, fmt.Sprintf("%s=%d", name, v))
		}
	}
	var reply struct {
		From uint64              `json:"from"`
		To   uint64              `json:"to"`
		Diff []policy.Difference `json:"diff"`
	}
	if err := r.request(ctx, http.MethodGet, "/api/config/diff?"+strings.Join(q, "&"), nil, nil, &reply); err != nil {
		return err
	}
	return r.show(reply, func(w io.Writer) {
		fmt.Fprintf(w, "Version %d to %d:\n", reply.From, reply.To)
		writeDiff(w, reply.Diff)
	})
}

type historyCommand struct {
	Limit  int    `name:"limit" default:"20" help:"How many, to 100."`
	Before uint64 `name:"before" help:"Only versions below this one."`
}

func (c *historyCommand) Run(ctx context.Context, r *remote) error {
	var reply struct {
		Versions []struct {
			Version    uint64    `json:"version"`
			By         string    `json:"by"`
			Via        string    `json:"via"`
			Time       time.Time `json:"time"`
			Actor      string    `json:"actor,omitempty"`
			Reason     string    `json:"reason,omitempty"`
			Unreadable bool      `json:"unreadable,omitempty"`
		} `json:"versions"`
		Next uint64 `json:"next,omitempty"`
	}
	path := fmt.Sprintf("/api/config/versions?limit=%d", c.Limit)
	if c.Before > 0 {
		path += fmt.Sprintf("&before=%d", c.Before)
	}
	if err := r.request(ctx, http.MethodGet, path, nil, nil, &reply); err != nil {
		return err
	}
	return r.show(reply, func(w io.Writer) {
		fmt.Fprintln(w, "VERSION\tTIME\tVIA\tBY\tACTOR\tREASON")
		for _, v := range reply.Versions {
			if v.Unreadable {
				v.Reason = "can't be read, and never was in force"
			}
			fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\n", v.Version, v.Time.Format(time.RFC3339), v.Via, v.By, v.Actor, v.Reason)
		}
		if reply.Next > 0 {
			fmt.Fprintf(w, "more: --before %d\n", reply.Next)
		}
	})
}

type rollbackCommand struct {
	changing
	To uint64 `arg:"" help:"The version to go back to."`
}

func (c *rollbackCommand) Run(ctx context.Context, r *remote) error {
	return c.send(ctx, r, http.MethodPost, "/api/config/rollback", nil, map[string]uint64{"to": c.To})
}

type routeCommands struct {
	List   routeListCommand   `cmd:"" help:"List the routes with their quotas."`
	Get    routeGetCommand    `cmd:"" help:"Print a route."`
	Set    routeSetCommand    `cmd:"" help:"Change a route's quota, algorithm or shadow mode: NAME capacity=5 refill_rate=1."`
	Add    routeAddCommand    `cmd:"" help:"Add a route, or replace one, from a file or KEY=VALUE: NAME path=/x upstream=sample capacity=5 refill_rate=1."`
	Delete routeDeleteCommand `cmd:"" help:"Remove a route."`
}

type routeListCommand struct{}

func (routeListCommand) Run(ctx context.Context, r *remote) error {
	_, p, err := inForce(ctx, r, 0)
	if err != nil {
		return err
	}
	return r.show(p.Routes, func(w io.Writer) {
		fmt.Fprintln(w, "ROUTE\tPATH\tUPSTREAM\tCAPACITY\tREFILL/S\tLIMIT\tWINDOW")
		for _, name := range slices.Sorted(maps.Keys(p.Routes)) {
			x := p.Routes[name]
			fmt.Fprintf(w, "%s\t%s%s\t%s\t%d\t%g\t%d\t%ds\n", name, x.Host, x.Path, x.Upstream, x.Capacity, x.RefillRate, x.SlidingLimit, x.WindowSeconds)
		}
	})
}

type routeGetCommand struct {
	Name string `arg:"" help:"The route."`
}

func (c *routeGetCommand) Run(ctx context.Context, r *remote) error {
	_, p, err := inForce(ctx, r, 0)
	if err != nil {
		return err
	}
	route, ok := p.Routes[c.Name]
	if !ok {
		return exitError{exitNotFound, fmt.Errorf("there is no route %s", c.Name)}
	}
	return r.show(route, func(w io.Writer) {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		_ = e.Encode(route) // to a buffer
	})
}

type routeSetCommand struct {
	changing
	Name   string   `arg:"" help:"The route."`
	Values []string `arg:"" placeholder:"KEY=VALUE" help:"capacity, refill_rate, sliding_limit, window_seconds, max_debt, algorithm, shadow_mode."`
}

func (c *routeSetCommand) Run(ctx context.Context, r *remote) error {
	values, err := keyValues(c.Values)
	if err != nil {
		return err
	}
	return c.send(ctx, r, http.MethodPost, "/api/control", nil, map[string]any{"routes": map[string]any{c.Name: values}})
}

// keyValues reads KEY=VALUE: numbers, truth values, JSON in brackets or braces, else text.
func keyValues(args []string) (map[string]any, error) {
	out := map[string]any{}
	for _, arg := range args {
		key, text, ok := strings.Cut(arg, "=")
		if !ok || key == "" {
			return nil, exitError{exitUsage, fmt.Errorf("%q: want KEY=VALUE", arg)}
		}
		var v any
		if json.Unmarshal([]byte(text), &v) != nil {
			v = text
		} else if _, number := v.(float64); number {
			v = json.Number(text) // as it was written
		}
		out[key] = v
	}
	return out, nil
}

type routeAddCommand struct {
	changing
	Name   string   `arg:"" help:"The route."`
	Values []string `arg:"" optional:"" placeholder:"KEY=VALUE" help:"Its keys."`
	File   string   `name:"file" short:"f" help:"The route as JSON; - reads standard input."`
}

func (c *routeAddCommand) Run(ctx context.Context, r *remote) error {
	values, err := keyValues(c.Values)
	if err != nil {
		return err
	}
	var route any = values
	if c.File != "" {
		doc, err := readFile(c.File)
		if err != nil {
			return err
		}
		route = json.RawMessage(doc)
	}
	return c.edit(ctx, r, func(routes map[string]any) error { routes[c.Name] = route; return nil })
}

// edit changes the routes of the document in force, on the condition that it still is.
func (c changing) edit(ctx context.Context, r *remote, change func(routes map[string]any) error) error {
	v, _, err := inForce(ctx, r, 0)
	if err != nil {
		return err
	}
	var doc map[string]any
	d := json.NewDecoder(strings.NewReader(string(v.Document)))
	d.UseNumber()
	if err := d.Decode(&doc); err != nil {
		return err
	}
	routes, ok := doc["routes"].(map[string]any)
	if !ok {
		return errors.New("the policy in force has no routes")
	}
	if err := change(routes); err != nil {
		return err
	}
	if c.IfMatch == 0 {
		c.IfMatch = v.Version
	}
	return c.send(ctx, r, http.MethodPut, "/api/config", nil, doc)
}

type routeDeleteCommand struct {
	changing
	Name string `arg:"" help:"The route."`
}

func (c *routeDeleteCommand) Run(ctx context.Context, r *remote) error {
	return c.edit(ctx, r, func(routes map[string]any) error {
		if _, ok := routes[c.Name]; !ok {
			return exitError{exitNotFound, fmt.Errorf("there is no route %s", c.Name)}
		}
		delete(routes, c.Name)
		return nil
	})
}

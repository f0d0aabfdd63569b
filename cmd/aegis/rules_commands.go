package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/aegisrate/aegisrate/pkg/rules"
)

// at makes a path of parts that may hold anything.
func at(parts ...string) string {
	for i, p := range parts {
		parts[i] = url.PathEscape(p)
	}
	return "/api/" + strings.Join(parts, "/")
}

type planCommands struct {
	List   planListCommand   `cmd:"" help:"List the plans in force."`
	Set    planSetCommand    `cmd:"" help:"Add a plan, or replace one."`
	Delete planDeleteCommand `cmd:"" help:"Remove a plan of the rules that no user has."`
}

type planInfo struct {
	Name       string  `json:"name"`
	Rate       float64 `json:"rate,omitempty"`
	Burst      int64   `json:"burst,omitempty"`
	DailyQuota int64   `json:"daily_quota,omitempty"`
	RPM        int64   `json:"rpm,omitempty"`
	TPM        int64   `json:"tpm,omitempty"`
	Source     string  `json:"source,omitempty"`
}

func writePlans(w io.Writer, plans ...planInfo) {
	fmt.Fprintln(w, "PLAN\tRATE/S\tBURST\tDAILY\tRPM\tTPM\tFROM")
	for _, p := range plans {
		fmt.Fprintf(w, "%s\t%g\t%d\t%d\t%d\t%d\t%s\n", p.Name, p.Rate, p.Burst, p.DailyQuota, p.RPM, p.TPM, p.Source)
	}
}

type planListCommand struct{}

func (planListCommand) Run(ctx context.Context, r *remote) error {
	var reply struct {
		Plans []planInfo `json:"plans"`
	}
	if err := r.request(ctx, http.MethodGet, "/api/plans", nil, nil, &reply); err != nil {
		return err
	}
	return r.show(reply, func(w io.Writer) { writePlans(w, reply.Plans...) })
}

type planSetCommand struct {
	Name   string   `arg:"" help:"The plan."`
	Values []string `arg:"" optional:"" placeholder:"KEY=VALUE" help:"rate and burst (tokens a second, tokens), daily_quota, rpm and tpm (of LLM routes); what is left out is unlimited."`
}

func (c *planSetCommand) Run(ctx context.Context, r *remote) error {
	values, err := keyValues(c.Values)
	if err != nil {
		return err
	}
	var plan planInfo
	if err := r.request(ctx, http.MethodPut, at("plans", c.Name), nil, values, &plan); err != nil {
		return err
	}
	return r.show(plan, func(w io.Writer) { writePlans(w, plan) })
}

type planDeleteCommand struct {
	Name string `arg:"" help:"The plan."`
}

func (c *planDeleteCommand) Run(ctx context.Context, r *remote) error {
	if err := r.request(ctx, http.MethodDelete, at("plans", c.Name), nil, nil, nil); err != nil {
		return err
	}
	return r.done("Plan %s is gone.", c.Name)
}

type userCommands struct {
	List       userListCommand       `cmd:"" help:"List users, or addresses with rules of their own."`
	Get        userGetCommand        `cmd:"" help:"Show a user with its keys and overrides."`
	Create     userCreateCommand     `cmd:"" help:"Add a user."`
	Set        userSetCommand        `cmd:"" help:"Change a user's plan, or whether it is an admin."`
	Delete     userDeleteCommand     `cmd:"" help:"Remove a user with its keys."`
	Override   userOverrideCommand   `cmd:"" help:"Give a client a limit of its own on a route: NAME ROUTE capacity=5 refill_rate=1; over all routes: NAME '*' rate=5 burst=10."`
	Unoverride userUnoverrideCommand `cmd:"" help:"Take it away."`
}

type userListCommand struct {
	After     string `name:"after" help:"Begin after this name."`
	Limit     int    `name:"limit" default:"100" help:"How many, to 1000."`
	Plan      string `name:"plan" help:"Only users of this plan."`
	Addresses bool   `name:"addresses" help:"Addresses in place of users."`
}

func (c *userListCommand) Run(ctx context.Context, r *remote) error {
	q := url.Values{"limit": {fmt.Sprint(c.Limit)}}
	for name, v := range map[string]string{"after": c.After, "plan": c.Plan} {
		if v != "" {
			q.Set(name, v)
		}
	}
	if c.Addresses {
		q.Set("addresses", "true")
	}
	var reply struct {
		Users []rules.User `json:"users"`
		Next  string       `json:"next,omitempty"`
	}
	if err := r.request(ctx, http.MethodGet, "/api/users?"+q.Encode(), nil, nil, &reply); err != nil {
		return err
	}
	return r.show(reply, func(w io.Writer) {
		fmt.Fprintln(w, "USER\tPLAN\tADMIN\tKEYS\tOVERRIDES\tBLOCKED")
		for _, u := range reply.Users {
			fmt.Fprintf(w, "%s\t%s\t%t\t%d\t%d\t%t\n", u.Name, u.Plan, u.Admin, len(u.Keys), len(u.Overrides), u.Block != nil)
		}
		if reply.Next != "" {
			fmt.Fprintf(w, "more: --after %s\n", reply.Next)
		}
	})
}

func writeUser(w io.Writer, u rules.User) {
	fmt.Fprintf(w, "user\t%s\nplan\t%s\nadmin\t%t\n", u.Name, u.Plan, u.Admin)
	if u.Block != nil {
		fmt.Fprintf(w, "blocked\t%s %s\n", ending(u.Block.Until), u.Block.Reason)
	}
	for _, k := range u.Keys {
		fmt.Fprintf(w, "key\t%s %s %s\n", k.ID(), k.Label, ending(k.Expires))
	}
	for _, o := range u.Overrides {
		route := o.Route
		if route == "" {
			route = "*"
		}
		expires := o.Expires
		o.Route, o.Expires = "", time.Time{}
		limit, _ := json.Marshal(o) // plain numbers always encode
		fmt.Fprintf(w, "override\t%s %s %s\n", route, limit, ending(expires))
	}
}

func ending(t time.Time) string {
	if t.IsZero() {
		return "for good"
	}
	return "until " + t.Format(time.RFC3339)
}

// showUser asks for something that answers with a user.
func showUser(ctx context.Context, r *remote, method, path string, body any) error {
	var u rules.User
	if err := r.request(ctx, method, path, nil, body, &u); err != nil {
		return err
	}
	return r.show(u, func(w io.Writer) { writeUser(w, u) })
}

type userGetCommand struct {
	Name string `arg:"" help:"The user."`
}

func (c *userGetCommand) Run(ctx context.Context, r *remote) error {
	return showUser(ctx, r, http.MethodGet, at("users", c.Name), nil)
}

type userCreateCommand struct {
	Name  string `arg:"" help:"The user."`
	Plan  string `name:"plan" help:"Its plan."`
	Admin bool   `name:"admin" help:"Exempt from every limit."`
}

func (c *userCreateCommand) Run(ctx context.Context, r *remote) error {
	return showUser(ctx, r, http.MethodPost, at("users"), map[string]any{"name": c.Name, "plan": c.Plan, "admin": c.Admin})
}

type userSetCommand struct {
	Name  string  `arg:"" help:"The user."`
	Plan  *string `name:"plan" help:"Its plan; '' for none."`
	Admin *bool   `name:"admin" negatable:"" help:"Exempt from every limit, or not."`
}

func (c *userSetCommand) Run(ctx context.Context, r *remote) error {
	body := map[string]any{}
	if c.Plan != nil {
		body["plan"] = *c.Plan
	}
	if c.Admin != nil {
		body["admin"] = *c.Admin
	}
	return showUser(ctx, r, http.MethodPatch, at("users", c.Name), body)
}

type userDeleteCommand struct {
	Name string `arg:"" help:"The user."`
}

func (c *userDeleteCommand) Run(ctx context.Context, r *remote) error {
	if err := r.request(ctx, http.MethodDelete, at("users", c.Name), nil, nil, nil); err != nil {
		return err
	}
	return r.done("User %s is gone.", c.Name)
}

type userOverrideCommand struct {
	Name   string        `arg:"" help:"The user, or an address such as ip:192.0.2.7."`
	Route  string        `arg:"" help:"The route; * for all together."`
	Values []string      `arg:"" placeholder:"KEY=VALUE" help:"Its quota."`
	For    time.Duration `name:"for" help:"End it after this time; default: never."`
}

func (c *userOverrideCommand) Run(ctx context.Context, r *remote) error {
	values, err := keyValues(c.Values)
	if err != nil {
		return err
	}
	if c.For > 0 {
		values["expires"] = time.Now().Add(c.For).UTC().Format(time.RFC3339)
	}
	return showUser(ctx, r, http.MethodPut, at("users", c.Name, "overrides", c.Route), values)
}

type userUnoverrideCommand struct {
	Name  string `arg:"" help:"The user or address."`
	Route string `arg:"" help:"The route; * for all together."`
}

func (c *userUnoverrideCommand) Run(ctx context.Context, r *remote) error {
	if err := r.request(ctx, http.MethodDelete, at("users", c.Name, "overrides", c.Route), nil, nil, nil); err != nil {
		return err
	}
	return r.done("%s has no limit of its own on %s any more.", c.Name, c.Route)
}

type keyCommands struct {
	List   keyListCommand   `cmd:"" help:"List a user's keys."`
	Create keyCreateCommand `cmd:"" help:"Make an API key, and print it this once."`
	Delete keyDeleteCommand `cmd:"" help:"Withdraw a key."`
}

type keyListCommand struct {
	User string `arg:"" help:"The user."`
}

func (c *keyListCommand) Run(ctx context.Context, r *remote) error {
	var u rules.User
	if err := r.request(ctx, http.MethodGet, at("users", c.User), nil, nil, &u); err != nil {
		return err
	}
	return r.show(u.Keys, func(w io.Writer) {
		fmt.Fprintln(w, "KEY\tLABEL\tCREATED\tENDS")
		for _, k := range u.Keys {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", k.ID(), k.Label, k.Created.Format(time.RFC3339), ending(k.Expires))
		}
	})
}

type keyCreateCommand struct {
	User  string        `arg:"" help:"The user."`
	Label string        `name:"label" help:"What it is for."`
	For   time.Duration `name:"for" help:"End it after this time; default: never."`
	Hash  string        `name:"hash" help:"Take over a key by its SHA-256 instead."`
}

func (c *keyCreateCommand) Run(ctx context.Context, r *remote) error {
	body := map[string]any{"label": c.Label, "hash": c.Hash}
	if c.For > 0 {
		body["expires"] = time.Now().Add(c.For).UTC().Format(time.RFC3339)
	}
	var k struct {
		ID      string    `json:"id"`
		Key     string    `json:"key,omitempty"`
		Hash    string    `json:"hash"`
		Label   string    `json:"label,omitempty"`
		Created time.Time `json:"created"`
		Expires time.Time `json:"expires,omitzero"`
	}
	if err := r.request(ctx, http.MethodPost, at("users", c.User, "keys"), nil, body, &k); err != nil {
		return err
	}
	return r.show(k, func(w io.Writer) {
		if k.Key != "" {
			fmt.Fprintf(w, "%s\n\nThis is the only time that it is shown. ", k.Key)
		}
		fmt.Fprintf(w, "Key %s of %s is valid %s.\n", k.ID, c.User, ending(k.Expires))
	})
}

type keyDeleteCommand struct {
	User string `arg:"" help:"The user."`
	Key  string `arg:"" help:"The key's id, as key list has it."`
}

func (c *keyDeleteCommand) Run(ctx context.Context, r *remote) error {
	if err := r.request(ctx, http.MethodDelete, at("users", c.User, "keys", c.Key), nil, nil, nil); err != nil {
		return err
	}
	return r.done("Key %s of %s is withdrawn.", c.Key, c.User)
}

type clientCommands struct {
	Show    clientShowCommand    `cmd:"" help:"Show a client's balances and rules."`
	Reset   clientResetCommand   `cmd:"" help:"Make a client's buckets whole, debts forgiven."`
	Grant   clientGrantCommand   `cmd:"" help:"Give a client tokens back, never above the capacity."`
	Raise   clientRaiseCommand   `cmd:"" help:"Give a client another limit for a time: CLIENT ROUTE --for 1h capacity=50 refill_rate=5."`
	Block   clientBlockCommand   `cmd:"" help:"Refuse every request of a client."`
	Unblock clientUnblockCommand `cmd:"" help:"Let a client in again."`
}

// named is the client of a command.
type named struct {
	Client string `arg:"" help:"user:NAME, ip:ADDRESS or ip:PREFIX/BITS."`
}

type clientReply struct {
	Client   string          `json:"client"`
	Plan     string          `json:"plan,omitempty"`
	Admin    bool            `json:"admin,omitempty"`
	Blocked  bool            `json:"blocked"`
	Rules    *rules.User     `json:"rules"`
	Balances []clientBalance `json:"balances"`
}

type clientBalance struct {
	Scope        string  `json:"scope"`
	Algorithm    string  `json:"algorithm"`
	Capacity     float64 `json:"capacity"`
	Rate         float64 `json:"rate,omitempty"`
	Window       int64   `json:"window,omitempty"`
	Remaining    float64 `json:"remaining"`
	Grace        float64 `json:"grace"`
	ResetSeconds float64 `json:"reset_seconds"`
	Changes      int64   `json:"changes"`
}

func showClient(ctx context.Context, r *remote, method, path string, body any) error {
	var c clientReply
	if err := r.request(ctx, method, path, nil, body, &c); err != nil {
		return err
	}
	return r.show(c, func(w io.Writer) {
		fmt.Fprintf(w, "client\t%s\nplan\t%s\nadmin\t%t\nblocked\t%t\n\n", c.Client, c.Plan, c.Admin, c.Blocked)
		fmt.Fprintln(w, "LIMIT\tALGORITHM\tCAPACITY\tREMAINING\tGRACE\tWHOLE IN")
		for _, b := range c.Balances {
			fmt.Fprintf(w, "%s\t%s\t%.0f\t%.2f\t%.2f\t%.0fs\n", b.Scope, b.Algorithm, b.Capacity, b.Remaining, b.Grace, b.ResetSeconds)
		}
	})
}

type clientShowCommand struct{ named }

func (c *clientShowCommand) Run(ctx context.Context, r *remote) error {
	return showClient(ctx, r, http.MethodGet, at("clients", c.Client), nil)
}

type clientResetCommand struct {
	named
	Scope string `name:"scope" help:"A route, @plan or @day; default: all."`
}

func (c *clientResetCommand) Run(ctx context.Context, r *remote) error {
	return showClient(ctx, r, http.MethodPost, at("clients", c.Client, "reset"), map[string]string{"scope": c.Scope})
}

type clientGrantCommand struct {
	named
	Tokens float64 `arg:"" help:"How many."`
	Scope  string  `name:"scope" help:"A route, @plan or @day; default: all."`
}

func (c *clientGrantCommand) Run(ctx context.Context, r *remote) error {
	return showClient(ctx, r, http.MethodPost, at("clients", c.Client, "grant"), map[string]any{"tokens": c.Tokens, "scope": c.Scope})
}

type clientRaiseCommand struct {
	named
	Route  string        `arg:"" help:"The route; * for all together."`
	Values []string      `arg:"" placeholder:"KEY=VALUE" help:"Its quota."`
	For    time.Duration `name:"for" default:"1h" help:"How long."`
}

func (c *clientRaiseCommand) Run(ctx context.Context, r *remote) error {
	values, err := keyValues(c.Values)
	if err != nil {
		return err
	}
	values["seconds"] = c.For.Seconds()
	if c.Route != "*" {
		values["route"] = c.Route
	}
	return showUser(ctx, r, http.MethodPost, at("clients", c.Client, "raise"), values)
}

type clientBlockCommand struct {
	named
	For time.Duration `name:"for" help:"How long; default: until it is lifted."`
}

func (c *clientBlockCommand) Run(ctx context.Context, r *remote) error {
	return showUser(ctx, r, http.MethodPost, at("clients", c.Client, "block"), map[string]any{"seconds": c.For.Seconds(), "reason": r.Reason})
}

type clientUnblockCommand struct{ named }

func (c *clientUnblockCommand) Run(ctx context.Context, r *remote) error {
	return showUser(ctx, r, http.MethodPost, at("clients", c.Client, "unblock"), nil)
}

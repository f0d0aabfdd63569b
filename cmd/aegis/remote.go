package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/rs/zerolog"

	"github.com/aegisrate/aegisrate/pkg/bus"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// remote is the controlplane that commands speak to, and how they answer.
type remote struct {
	Server           string        `name:"server" short:"s" env:"AEGIS_SERVER" default:"http://127.0.0.1:8090" group:"remote" help:"The controlplane: http(s)://host:port, or nats://host:port to reach it over NATS."`
	TokenFile        string        `name:"token-file" env:"AEGIS_ADMIN_TOKEN_FILE" type:"path" group:"remote" help:"File holding the admin token; or give it as AEGIS_ADMIN_TOKEN."`
	NATSUser         string        `name:"nats-user" env:"AEGIS_NATS_USER" group:"remote" help:"NATS user, with nats://."`
	NATSPasswordFile string        `name:"nats-password-file" env:"AEGIS_NATS_PASSWORD_FILE" type:"path" group:"remote" help:"File holding its password; or give it as AEGIS_NATS_PASSWORD."`
	Timeout          time.Duration `name:"timeout" default:"15s" group:"remote" help:"How long an answer may take."`
	Actor            string        `name:"actor" env:"AEGIS_ACTOR" group:"remote" help:"Who asks, for the audit log; default: the name of this system's user."`
	Reason           string        `name:"reason" short:"m" group:"remote" help:"Why, for the audit log."`
	JSON             bool          `name:"json" group:"remote" help:"Print the answer as JSON."`

	out    io.Writer
	errs   io.Writer
	getenv func(string) string
}

// answer is what the controlplane said.
type answer struct {
	status int
	body   []byte
}

// problem is a refusal, as the API has it.
type problem struct {
	Status  int    `json:"status"`
	Detail  string `json:"detail"`
	Version uint64 `json:"version"`
	Errors  []struct {
		Path    string `json:"path"`
		Problem string `json:"problem"`
		Line    int    `json:"line"`
	} `json:"errors"`
}

// request asks the controlplane. body is sent as it is when it is bytes, else as JSON; into takes the answer.
func (r *remote) request(ctx context.Context, method, path string, header map[string]string, body, into any) error {
	data, raw := body.([]byte)
	if !raw && method != http.MethodGet {
		if body == nil {
			body = struct{}{}
		}
		var err error
		if data, err = json.Marshal(body); err != nil {
			return err
		}
	}
	token, err := r.token()
	if err != nil {
		return err
	}
	h := http.Header{}
	set := func(name, value string) {
		if value != "" {
			h.Set(name, value)
		}
	}
	set("X-Admin-Token", token)
	set("X-Admin-Actor", r.actor())
	set("X-Admin-Reason", r.Reason)
	if method != http.MethodGet {
		set("Content-Type", "application/json")
	}
	for name, value := range header {
		set(name, value)
	}
	ctx, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()
	ask := r.overHTTP
	if strings.HasPrefix(r.Server, "nats://") || strings.HasPrefix(r.Server, "tls://") {
		ask = r.overNATS
	}
	a, err := ask(ctx, method, path, h, data)
	if err != nil {
		return exitError{exitUnavailable, err}
	}
	if a.status >= http.StatusBadRequest {
		return refusal(a)
	}
	if into == nil || len(bytes.TrimSpace(a.body)) == 0 {
		return nil
	}
	if err := json.Unmarshal(a.body, into); err != nil {
		return fmt.Errorf("%s does not answer as a controlplane does: %w", r.Server, err)
	}
	return nil
}

// refusal is the error that an answer stands for.
func refusal(a answer) error {
	var p problem
	if json.Unmarshal(a.body, &p) != nil || p.Detail == "" {
		return exitError{exitFailed, fmt.Errorf("status %d: %.200s", a.status, a.body)}
	}
	code := exitFailed
	switch a.status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity, http.StatusUnsupportedMediaType:
		code = exitInvalid
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusTooManyRequests:
		code = exitDenied
	case http.StatusNotFound:
		code = exitNotFound
	case http.StatusConflict:
		code = exitConflict
	case http.StatusServiceUnavailable:
		code = exitUnavailable
	}
	text := p.Detail
	for i, e := range p.Errors {
		if i > 0 { // the first is in the detail
			text += fmt.Sprintf("\n  %s: %s", e.Path, e.Problem)
		}
	}
	return exitError{code, errors.New(text)}
}

func (r *remote) token() (string, error) {
	if r.TokenFile == "" {
		return r.getenv("AEGIS_ADMIN_TOKEN"), nil
	}
	data, err := os.ReadFile(r.TokenFile)
	if err != nil {
		return "", fmt.Errorf("--token-file: %w", err)
	}
	return strings.TrimRight(string(data), "\r\n"), nil
}

func (r *remote) actor() string {
	if r.Actor != "" {
		return r.Actor
	}
	return r.getenv("USER")
}

func (r *remote) overHTTP(ctx context.Context, method, path string, header http.Header, body []byte) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(r.Server, "/")+path, bytes.NewReader(body))
	if err != nil {
		return answer{}, fmt.Errorf("--server: %w", err)
	}
	req.Header = header
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{}, fmt.Errorf("the controlplane can't be reached (--server): %w", err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, data}, err
}

// connect connects to NATS as the operator.
func (r *remote) connect(ctx context.Context, url string) (*bus.Bus, error) {
	cfg := bus.Config{
		Name: "aegis", URL: url, User: r.NATSUser, PasswordFile: r.NATSPasswordFile,
		InboxPrefix: "_INBOX", // the operator's, as the nats command line has it
	}
	if cfg.User != "" && cfg.PasswordFile == "" {
		cfg.Secrets(r.getenv)
	}
	return bus.Connect(ctx, cfg, zerolog.Nop())
}

func (r *remote) overNATS(ctx context.Context, method, path string, header http.Header, body []byte) (answer, error) {
	b, err := r.connect(ctx, r.Server)
	if err != nil {
		return answer{}, err
	}
	defer b.Close()
	if !b.Connected() {
		return answer{}, fmt.Errorf("NATS can't be reached at %s, or refuses this user", r.Server)
	}
	header.Set(events.HeaderMethod, method)
	header.Set(events.HeaderPath, path)
	m, err := b.Call(ctx, events.SubjectControl, body, header)
	if err != nil {
		return answer{}, fmt.Errorf("the controlplane does not answer over NATS: %w", err)
	}
	a := answer{http.StatusOK, m.Data}
	if code := m.Header["Nats-Service-Error-Code"]; len(code) > 0 {
		if a.status, err = strconv.Atoi(code[0]); err != nil {
			return answer{}, fmt.Errorf("the controlplane answers %q", code[0])
		}
	}
	return a, nil
}

// show prints v as JSON with --json, else by text.
func (r *remote) show(v any, text func(w io.Writer)) error {
	if r.JSON {
		e := json.NewEncoder(r.out)
		e.SetIndent("", "  ")
		return e.Encode(v)
	}
	w := tabwriter.NewWriter(r.out, 2, 8, 2, ' ', 0)
	text(w)
	return w.Flush()
}

// done prints that a command without an answer has succeeded.
func (r *remote) done(format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	return r.show(map[string]string{"done": text}, func(w io.Writer) { fmt.Fprintln(w, text) })
}

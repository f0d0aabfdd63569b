package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

type policyCommands struct {
	Example   policyExampleCommand   `cmd:"" help:"Print the sample policy, with every key and its default."`
	PublicKey policyPublicKeyCommand `cmd:"" name:"public-key" help:"Print what edges verify versions by (AEGIS_CONFIG_PUBLIC_KEY), of the secret in AEGIS_CONFIG_KEY."`
	Schema    policySchemaCommand    `cmd:"" help:"Print the policy's JSON Schema, for editors."`
}

type validateCommand struct {
	File string `arg:"" help:"Policy in YAML or JSON; - reads standard input."`
}

func (c validateCommand) Run(r *remote) error {
	doc, err := readFile(c.File)
	if err != nil {
		return err
	}
	p, err := policy.Parse(doc)
	var problems policy.Errors
	if errors.As(err, &problems) {
		for _, problem := range problems {
			fmt.Fprintf(r.errs, "%s: %v\n", c.File, problem)
		}
		if r.JSON {
			if err := r.show(map[string]any{"valid": false, "errors": problems}, nil); err != nil {
				return err
			}
		}
		return exitError{exitInvalid, fmt.Errorf("%s: not a valid policy; nothing of it would be used", c.File)}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", c.File, err)
	}
	return r.show(map[string]any{"valid": true, "routes": len(p.Routes), "upstreams": len(p.Upstreams), "plans": len(p.Plans), "users": len(p.Users)}, func(w io.Writer) {
		fmt.Fprintf(w, "%s: valid (%d routes, %d upstreams, %d plans, %d users)\n", c.File, len(p.Routes), len(p.Upstreams), len(p.Plans), len(p.Users))
	})
}

type policyExampleCommand struct{}

func (policyExampleCommand) Run(r *remote) error {
	_, err := r.out.Write(policy.Example())
	return err
}

type policySchemaCommand struct{}

func (policySchemaCommand) Run(r *remote) error {
	schema, err := policy.Schema()
	if err != nil {
		return err
	}
	_, err = r.out.Write(schema)
	return err
}

type policyPublicKeyCommand struct{}

func (policyPublicKeyCommand) Run(r *remote) error {
	secret := r.getenv("AEGIS_CONFIG_KEY")
	if secret == "" {
		return exitError{exitUsage, errors.New("AEGIS_CONFIG_KEY must hold the controlplane's secret")}
	}
	_, err := fmt.Fprintln(r.out, events.PublicKeyText(events.ConfigKey(secret)))
	return err
}

// readFile reads a policy, but not more than a little over what a policy may have, so that
// the parser says what is too large.
func readFile(name string) ([]byte, error) {
	in := os.Stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	return io.ReadAll(io.LimitReader(in, 2*policy.MaxDocument))
}

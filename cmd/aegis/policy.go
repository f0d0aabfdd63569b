package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/aegisrate/aegisrate/pkg/policy"
)

type policyCommands struct {
	Validate policyValidateCommand `cmd:"" help:"Check a policy file; lists every problem with its path and line."`
	Example  policyExampleCommand  `cmd:"" help:"Print the sample policy, with every key and its default."`
	Schema   policySchemaCommand   `cmd:"" help:"Print the policy's JSON Schema, for editors."`
}

type policyValidateCommand struct {
	File string `arg:"" help:"Policy in YAML or JSON; - reads standard input."`
}

func (c policyValidateCommand) Run() error {
	doc, err := readFile(c.File)
	if err != nil {
		return err
	}
	p, err := policy.Parse(doc)
	var problems policy.Errors
	if errors.As(err, &problems) {
		for _, problem := range problems {
			fmt.Fprintf(os.Stderr, "%s: %v\n", c.File, problem)
		}
		return fmt.Errorf("%s: not a valid policy; nothing of it would be used", c.File)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", c.File, err)
	}
	fmt.Printf("%s: valid (%d routes, %d upstreams, %d plans, %d users)\n", c.File, len(p.Routes), len(p.Upstreams), len(p.Plans), len(p.Users))
	return nil
}

type policyExampleCommand struct{}

func (policyExampleCommand) Run() error {
	_, err := os.Stdout.Write(policy.Example())
	return err
}

type policySchemaCommand struct{}

func (policySchemaCommand) Run() error {
	schema, err := policy.Schema()
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(schema)
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

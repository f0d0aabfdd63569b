package main

import (
	"flag"
	"fmt"
	"io"
	"os"
)

func main() {
	keep := flag.String("keep", "", "also write the raw stream to this `file`")
	total := flag.Bool("total", false, "sum up the kept streams named as arguments")
	flag.Parse()
	ok, err := run(*keep, *total, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(1)
	}
	if !ok {
		os.Exit(1)
	}
}

func run(keep string, total bool, files []string) (ok bool, err error) {
	sum := newSummary()
	if total {
		for _, name := range files {
			f, err := os.Open(name)
			if err != nil {
				return false, err
			}
			err = sum.read(f, io.Discard)
			f.Close()
			if err != nil {
				return false, fmt.Errorf("%s: %w", name, err)
			}
		}
	} else {
		var in io.Reader = os.Stdin
		if keep != "" {
			f, err := os.Create(keep)
			if err != nil {
				return false, err
			}
			defer f.Close()
			in = io.TeeReader(os.Stdin, f)
		}
		if err := sum.read(in, os.Stdout); err != nil {
			return false, err
		}
	}
	return sum.report(os.Stdout), nil
}

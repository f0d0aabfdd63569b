package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// event is a line of `go test -json`; see `go doc test2json`.
type event struct {
	Action      string
	Package     string
	Test        string
	Output      string
	Elapsed     float64
	ImportPath  string // of build-output and build-fail
	FailedBuild string
}

// result of a test; a higher one is worse.
type result int

const (
	unfinished result = iota + 1
	passed
	skipped
	failed
)

// id names a test or, with an empty test, what a package does outside of its tests.
type id struct{ pkg, test string }

type summary struct {
	results map[id]result
	output  map[id][]string
	// open has the tests and packages that have begun in the current stream and not ended.
	open map[id]bool
}

func newSummary() *summary {
	return &summary{results: make(map[id]result), output: make(map[id][]string), open: make(map[id]bool)}
}

// read takes in one stream and writes a line for each package, and failures whole, to w.
func (s *summary) read(in io.Reader, w io.Writer) error {
	clear(s.open)
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			s.line(line, w)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	// What never ended was cut off: the stream broke, or the process was killed.
	for i := range s.open {
		fmt.Fprintf(w, "FAIL  %s %s: no result\n", i.pkg, i.test)
		s.worst(i, failed)
	}
	return nil
}

func (s *summary) line(line string, w io.Writer) {
	var e event
	if json.Unmarshal([]byte(line), &e) != nil || e.Action == "" {
		fmt.Fprint(w, line) // the go command's own words
		return
	}
	at := id{e.Package, e.Test}
	switch e.Action {
	case "start", "run":
		s.open[at] = true
		delete(s.output, at)
	case "output":
		s.output[at] = append(s.output[at], e.Output)
	case "build-output":
		fmt.Fprint(w, e.Output)
	case "build-fail":
		s.worst(id{e.ImportPath, "(build)"}, failed)
	case "pass", "fail", "skip":
		delete(s.open, at)
		if e.Test == "" {
			s.packageEnd(e, w)
			return
		}
		switch e.Action {
		case "pass":
			s.worst(at, passed)
		case "skip":
			s.worst(at, skipped)
			fmt.Fprintf(w, "SKIP  %s %s\n%s", e.Package, e.Test, indent(s.output[at]))
		case "fail":
			s.worst(at, failed)
			fmt.Fprintf(w, "FAIL  %s %s (%.2fs)\n%s", e.Package, e.Test, e.Elapsed, indent(s.output[at]))
		}
		delete(s.output, at)
	}
}

// packageEnd settles what a package's result says beyond its tests': a package may
// fail though no test of it did (it did not build, TestMain failed, it panicked or
// was killed), and that must not pass for "0 failed".
func (s *summary) packageEnd(e event, w io.Writer) {
	at := id{e.Package, ""}
	count, bad := 0, false
	for i, r := range s.results {
		if i.pkg == e.Package && i.test != "" {
			count++
			bad = bad || r == failed
		}
	}
	switch {
	case e.Action == "fail":
		fmt.Fprintf(w, "FAIL  %s (%.2fs)\n%s", e.Package, e.Elapsed, indent(s.output[at]))
		for i := range s.open {
			if i.pkg == e.Package && i.test != "" {
				fmt.Fprintf(w, "FAIL  %s %s: did not end\n%s", i.pkg, i.test, indent(s.output[i]))
				s.worst(i, failed)
				delete(s.open, i)
				bad = true
			}
		}
		if !bad && e.FailedBuild == "" {
			s.worst(id{e.Package, "(package)"}, failed)
		}
	case count > 0:
		fmt.Fprintf(w, "ok    %s: %d tests (%.2fs)\n", e.Package, count, e.Elapsed)
	}
	delete(s.output, at)
}

func (s *summary) worst(i id, r result) { s.results[i] = max(s.results[i], r) }

// report writes what failed and was skipped, then the last line, and tells whether all is well.
func (s *summary) report(w io.Writer) bool {
	count := make(map[result]int)
	var names []string
	for i, r := range s.results {
		count[r]++
		switch r {
		case failed:
			names = append(names, "FAIL  "+strings.TrimSpace(i.pkg+" "+i.test))
		case skipped:
			names = append(names, "SKIP  "+strings.TrimSpace(i.pkg+" "+i.test))
		}
	}
	slices.Sort(names)
	for _, n := range names {
		fmt.Fprintln(w, n)
	}
	if len(s.results) == 0 {
		fmt.Fprintln(w, "no test ran")
	}
	fmt.Fprintf(w, "%d passed, %d failed", count[passed], count[failed])
	if count[skipped] > 0 {
		fmt.Fprintf(w, ", %d skipped (a skipped test is a failure here)", count[skipped])
	}
	fmt.Fprintln(w)
	return count[passed] > 0 && count[failed] == 0 && count[skipped] == 0
}

func indent(lines []string) string {
	var b strings.Builder
	for _, l := range lines {
		b.WriteString("      ")
		b.WriteString(strings.TrimRight(l, "\n"))
		b.WriteByte('\n')
	}
	return b.String()
}

// Command luacat prints a script as Redis runs it: with the shared library in front.
// It is for reading and for linting, since a part by itself refers to names of the others.
//
//	go run ./internal/luacat check
package main

import (
	"fmt"
	"os"

	"github.com/aegisrate/aegisrate/lua"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: luacat SCRIPT (check, settle, ...)")
		os.Exit(2)
	}
	text, err := lua.Script(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Print(text)
}

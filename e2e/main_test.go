package e2e

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/e2e/stack"
)

const edges = 3

// running is the stack that all tests share.
var running *stack.Stack

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var err error
	running, err = stack.Start(ctx, edges)
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if code != 0 && running != nil {
			fmt.Fprintln(os.Stderr, running.Logs(ctx))
		}
		if err := running.Down(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "tear down:", err)
			code = 1
		}
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "start the stack:", err)
		return 1
	}
	return m.Run()
}

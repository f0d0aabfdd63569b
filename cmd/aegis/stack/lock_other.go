//go:build !unix

package stack

import (
	"fmt"
	"os"
)

// lockDir makes the data directory; where there is no flock it cannot keep a second stack out.
func lockDir(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	return func() {}, nil
}

//go:build unix

package stack

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// lockDir makes the data directory this process's own until unlock or the process's end:
// two NATS servers on one directory would destroy its streams.
func lockDir(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "aegis.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return func() { f.Close() }, nil
	}
	f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, fmt.Errorf("--data-dir: another aegis up runs on %s: stop it, or choose another directory", dir)
	}
	return nil, fmt.Errorf("--data-dir: lock %s: %w", dir, err)
}

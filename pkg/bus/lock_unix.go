//go:build unix

package bus

import (
	"errors"
	"os"
	"syscall"
)

// lock makes a file this process's own until it is closed; else errLocked.
func lock(f *os.File) error {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return errLocked
	}
	return err
}

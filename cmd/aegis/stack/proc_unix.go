//go:build unix && !linux

package stack

import "syscall"

// ownGroup starts a child in a process group of its own, since Ctrl-C reaches the
// whole group of the terminal and Redis must outlive those who still settle into it.
func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}

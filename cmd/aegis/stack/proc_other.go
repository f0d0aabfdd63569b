//go:build !unix

package stack

import "syscall"

// ownGroup has nothing to ask for where there are no process groups.
func ownGroup() *syscall.SysProcAttr { return nil }

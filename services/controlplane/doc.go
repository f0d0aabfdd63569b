// Package controlplane is one of the four services; see ARCHITECTURE.md.
package controlplane

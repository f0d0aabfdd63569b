// Package settler is one of the four services; see ARCHITECTURE.md.
package settler

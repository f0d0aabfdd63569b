// Package healthwatch is one of the four services; see ARCHITECTURE.md.
package healthwatch

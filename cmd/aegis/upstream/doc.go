// Package upstream is the sample backend behind the gateway: endpoints that are
// fast, slow, failing or expensive on demand, and a switch that breaks all of
// them at once. It serves `aegis up`, the compose stack and tests.
package upstream

// Package telemetry is how a service shows itself: its log, its metrics, its
// health, and the one set-up of an HTTP server that all services share.
//
// Every service has an admin address of its own with /healthz (the process
// runs), /readyz (it can do its job; JSON says why not) and /metrics.
package telemetry

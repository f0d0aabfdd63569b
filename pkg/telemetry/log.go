package telemetry

import (
	"fmt"
	"io"
	"time"

	"github.com/rs/zerolog"
)

// NewLogger writes log lines to w: level is debug, info, warn or error, format
// json (for machines) or console (for people). Every line names the service.
func NewLogger(w io.Writer, level, format, service string) (zerolog.Logger, error) {
	var l zerolog.Level
	switch level {
	case "debug":
		l = zerolog.DebugLevel
	case "info":
		l = zerolog.InfoLevel
	case "warn":
		l = zerolog.WarnLevel
	case "error":
		l = zerolog.ErrorLevel
	default:
		return zerolog.Nop(), fmt.Errorf("log-level: %q is not one of debug, info, warn, error", level)
	}
	switch format {
	case "json":
	case "console":
		w = zerolog.ConsoleWriter{Out: w, TimeFormat: time.TimeOnly}
	default:
		return zerolog.Nop(), fmt.Errorf("log-format: %q is neither json nor console", format)
	}
	return zerolog.New(w).Level(l).With().Timestamp().Str("service", service).Logger(), nil
}

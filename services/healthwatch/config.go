package healthwatch

import (
	"fmt"
	"time"
)

// Config is how a replica behaves; the tags are kong's. How multipliers move is
// policy, per upstream (policy.Health).
type Config struct {
	Interval time.Duration `name:"interval" env:"AEGIS_HEALTHWATCH_INTERVAL" default:"1s" help:"Pause between two steps of a multiplier."`
	// Name names the replica in the ticks that it computes.
	Name string `name:"name" env:"AEGIS_HEALTHWATCH_NAME" help:"Name of this replica; its host name by default."`
}

// DefaultConfig is what the flags default to, for a replica of that name.
func DefaultConfig(name string) Config { return Config{Interval: time.Second, Name: name} }

// Validate reports the first setting that cannot work.
func (c Config) Validate() error {
	if c.Interval < 10*time.Millisecond || c.Interval > time.Minute {
		return fmt.Errorf("interval: %v: want 10ms to 1m", c.Interval)
	}
	return nil
}

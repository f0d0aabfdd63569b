package settler

import (
	"errors"
	"fmt"
	"time"
)

// Config is how a settler behaves; the tags are kong's.
type Config struct {
	StoreTimeout     time.Duration `name:"store-timeout" env:"AEGIS_SETTLER_STORE_TIMEOUT" default:"1s" help:"Bound on one call to the store; a shard that takes longer is parked."`
	Parallel         int           `name:"parallel" env:"AEGIS_SETTLER_PARALLEL" default:"8" help:"Shards settled at the same time."`
	IdleEvery        time.Duration `name:"idle-every" env:"AEGIS_SETTLER_IDLE_EVERY" default:"1s" help:"How often the cursors of idle shards advance, and lost or rewound state is looked for."`
	PurgeEvery       time.Duration `name:"purge-every" env:"AEGIS_SETTLER_PURGE_EVERY" default:"10s" help:"How often settled messages are removed from the stream."`
	PurgeMargin      uint64        `name:"purge-margin" env:"AEGIS_SETTLER_PURGE_MARGIN" default:"100000" help:"Settled messages kept in the stream: how far a stale Redis replica may be behind."`
	PurgeAge         time.Duration `name:"purge-age" env:"AEGIS_SETTLER_PURGE_AGE" default:"1h" help:"Younger messages are kept, unless the stream is more than half full."`
	CounterRetention time.Duration `name:"counter-retention" env:"AEGIS_SETTLER_COUNTER_RETENTION" default:"72h" help:"How long after its last message left the stream a batch is still recognised when it is published again."`
}

// DefaultConfig is what the flags default to.
func DefaultConfig() Config {
	return Config{
		StoreTimeout:     time.Second,
		Parallel:         8,
		IdleEvery:        time.Second,
		PurgeEvery:       10 * time.Second,
		PurgeMargin:      100_000,
		PurgeAge:         time.Hour,
		CounterRetention: 72 * time.Hour,
	}
}

// Validate reports the first setting out of range.
func (c Config) Validate() error {
	for name, d := range map[string]time.Duration{
		"store-timeout": c.StoreTimeout, "idle-every": c.IdleEvery, "purge-every": c.PurgeEvery,
	} {
		if d < 10*time.Millisecond || d > time.Hour {
			return fmt.Errorf("%s: %v: want 10ms to 1h", name, d)
		}
	}
	if c.PurgeAge < 0 || c.CounterRetention < 0 {
		return errors.New("purge-age, counter-retention: must not be negative")
	}
	if c.Parallel < 1 || c.Parallel > 256 {
		return fmt.Errorf("parallel: %d: want 1 to 256", c.Parallel)
	}
	return nil
}

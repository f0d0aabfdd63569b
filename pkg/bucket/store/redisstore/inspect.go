package redisstore

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Server is what a Redis says of itself.
type Server struct {
	// Policy is its maxmemory-policy; MaxMemory and UsedMemory are in bytes, 0 for no bound.
	Policy                string
	MaxMemory, UsedMemory int64
	// Time is its clock.
	Time time.Time
}

// Inspect asks a Redis (of a cluster, one of them) for its memory and clock.
func (s *Store) Inspect(ctx context.Context) (Server, error) {
	var out Server
	var err error
	if out.Time, err = s.pinger.Time(ctx).Result(); err != nil {
		return out, fmt.Errorf("time: %w", storeError(err))
	}
	text, err := s.pinger.Info(ctx, "memory").Result()
	if err != nil {
		return out, fmt.Errorf("info: %w", storeError(err))
	}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch name {
		case "maxmemory_policy":
			out.Policy = value
		case "maxmemory":
			out.MaxMemory, _ = strconv.ParseInt(value, 10, 64)
		case "used_memory":
			out.UsedMemory, _ = strconv.ParseInt(value, 10, 64)
		}
	}
	return out, nil
}

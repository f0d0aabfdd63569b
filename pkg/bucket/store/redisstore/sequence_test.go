package redisstore

import (
	"flag"
	"strconv"
	"testing"

	"github.com/aegisrate/aegisrate/pkg/bucket/store/storetest"
)

// Sequences and their length: 100,000 steps in all. `make soak` takes 1,000,000.
const sequences = 20

var steps = flag.Int("steps", 5_000, "the length of each random sequence")

// Memory, Redis and the exact model: decisions and stored state after every step.
func TestSequence(t *testing.T) {
	t.Parallel()
	for seed := range uint64(sequences) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			t.Parallel()
			storetest.Sequence(t, storetest.Seeded(seed), *steps, storetest.OnMemory(t), onRedis(t))
		})
	}
}

// FuzzSequence lets a fuzzer choose the steps.
func FuzzSequence(f *testing.F) {
	for seed := range byte(4) {
		f.Add([]byte{7, seed, 3, 0, 2, seed, 1, 9, 30, 12, seed, 4, 2, 11, 8, 1, 40, 5, 3, 1})
	}
	redis := onRedis(f).(*clocked)
	f.Fuzz(func(t *testing.T, choices []byte) {
		redis.t = t
		redis.empty()
		b := storetest.Bytes(choices)
		storetest.Sequence(t, &b, min(len(choices)/4+1, 200), storetest.OnMemory(t), redis)
	})
}

// empty forgets everything but the scripts.
func (c *clocked) empty() {
	if err := c.client.FlushDB(c.t.Context()).Err(); err != nil {
		c.t.Fatal(err)
	}
	clear(c.touched)
	c.due = 0
	c.SetClock(storetest.Epoch)
}

package ratelimiter_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/aegisrate/aegisrate/pkg/ratelimiter"
)

// Ten calls a minute: count first, compare, take back what was above. What fails later gives
// its call back to the minute that it was counted in.
func Example() {
	ctx := context.Background()
	minute := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	clock := minute
	limiter := ratelimiter.NewMemory(time.Minute, func() time.Time { return clock })

	admit := func(user string) (charged ratelimiter.Counter, ok bool) {
		const limit = 10
		charged = limiter.At(clock)
		n, err := limiter.Incr(ctx, user+"_RPM_CURRENT", 1)
		if err != nil || n > limit {
			charged.Incr(ctx, user+"_RPM_CURRENT", -1)
			return nil, false
		}
		return charged, true
	}

	charged, _ := admit("ann")
	for range 11 {
		admit("ann")
	}
	_, ok := admit("ann")
	fmt.Println("above the limit:", ok)

	clock = minute.Add(70 * time.Second) // the first call fails late, in the next minute
	charged.Incr(ctx, "ann_RPM_CURRENT", -1)
	_, ok = admit("ann")
	n, _ := limiter.Get(ctx, "ann_RPM_CURRENT")
	then, _ := charged.Get(ctx, "ann_RPM_CURRENT")
	fmt.Println("a minute later:", ok, "counted now:", n, "and then:", then)
	// Output:
	// above the limit: false
	// a minute later: true counted now: 1 and then: 9
}

// Limiters of different names never meet, whatever their keys.
func ExampleNewRedis() {
	client := redis.NewClient(&redis.Options{
		Addr:       "127.0.0.1:6379",
		MaxRetries: -1, // an increment that timed out may have counted: it must not be sent twice
	})
	defer client.Close()
	users, err := ratelimiter.NewRedis("aegis", client, time.Minute)
	if err != nil {
		log.Fatal(err)
	}
	models, err := ratelimiter.NewRedis("aegis_model", client, time.Second)
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	// One round trip for what belongs together; each counter is atomic by itself.
	n, err := users.IncrAll(ctx, ratelimiter.Count{Key: "ann_RPM_CURRENT", Val: 1}, ratelimiter.Count{Key: "ann_TPM_CURRENT", Val: 350})
	if err != nil {
		log.Fatal(err)
	}
	rps, err := models.Incr(ctx, "llama-3_MODEL_RPS_CURRENT", 1)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("requests, tokens, of the model:", n[0], n[1], rps)
}

package settler_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/redistest"
	"github.com/aegisrate/aegisrate/pkg/bus/bustest"
	"github.com/aegisrate/aegisrate/pkg/events"
)

// BenchmarkSettle measures how fast a settler works off a backlog of full batches (256
// events of 200 clients, two buckets each). One operation is one event.
func BenchmarkSettle(b *testing.B) {
	const perMessage, clients = 256, 200
	for name, open := range map[string]func() store.Store{
		"memory": func() store.Store { return memstore.New(nil) },
		"redis":  func() store.Store { return redisStore(b, redistest.Start(b)) },
	} {
		b.Run(name, func(b *testing.B) {
			bus := bustest.Start(b).Provisioned(b)
			s := open()
			first := start(b, bus, s, fast())
			settled(b, first)
			first.stop()
			p := newPublisher(b, bus, "boot", model{})
			messages := (b.N + perMessage - 1) / perMessage
			for n := range messages {
				var list []events.Response
				for k := range perMessage {
					list = append(list, event(fmt.Sprint(n, k), client((n*perMessage+k)%clients), "1.5"))
				}
				p.publish(p.encode(list...), p.id())
			}
			b.ResetTimer()
			begun := time.Now()
			i := start(b, bus, s, fast())
			settled(b, i)
			b.ReportMetric(float64(messages*perMessage)/time.Since(begun).Seconds(), "events/s")
			b.ReportMetric(i.metric(b, "settlements_total", "applied")/time.Since(begun).Seconds(), "settlements/s")
		})
	}
}

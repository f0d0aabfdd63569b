package bus

import (
	"testing"
	"time"

	"github.com/rs/zerolog"
)

// A batch of 64 events, some 25 KB, on its way through an empty spool: written, sent from memory, removed.
func BenchmarkSpool(b *testing.B) {
	s, err := openSpool(b.TempDir(), "boot", "subject", 256<<20, zerolog.Nop())
	if err != nil {
		b.Fatal(err)
	}
	defer s.close()
	data := make([]byte, 25<<10)
	b.SetBytes(int64(len(data)))
	for n := uint64(1); b.Loop(); n++ {
		if !s.push(record{"subject", "boot", n, 64, time.Now(), data}) {
			b.Fatal("no room")
		}
		s.pop()
	}
}

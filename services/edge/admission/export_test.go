package admission

import "github.com/aegisrate/aegisrate/pkg/bucket/store"

// Learn and Recall are what the engine calls.
func (s *Carried) Learn(c store.Check, d store.Decision) { s.learn(c, d) }

// Recall is what was seen of a check's buckets.
func (s *Carried) Recall(c store.Check) []store.Seen { return s.recall(c) }

// Len counts the buckets remembered.
func (s *Carried) Len() int {
	n := 0
	for i := range s.shards {
		n += len(s.shards[i].seen)
	}
	return n
}

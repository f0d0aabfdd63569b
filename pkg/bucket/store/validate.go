package store

import (
	"errors"
	"fmt"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

// ErrInvalid: the call breaks a rule of its own documentation; nothing was changed, and
// repeating it will not help.
var ErrInvalid = errors.New("store: invalid call")

// StateError is ErrState with the bucket it is about. In a Settle, nothing of the settlement
// was applied; the settler can set the item aside and settle the others.
type StateError struct {
	// Index is the bucket's place in Check.Limits or Settlement.Items.
	Index  int
	Reason string
}

func (e *StateError) Error() string {
	return fmt.Sprintf("%v: bucket %d: %s", ErrState, e.Index, e.Reason)
}

func (e *StateError) Unwrap() error { return ErrState }

// Validate reports, as ErrInvalid, the first field that breaks Check's documentation.
func (c Check) Validate() error {
	if len(c.Limits) == 0 || len(c.Limits) > MaxLimits {
		return fmt.Errorf("%w: limits: %d, want 1 to %d", ErrInvalid, len(c.Limits), MaxLimits)
	}
	if c.Cost < 0 || c.Cost > bucket.MaxMicro {
		return fmt.Errorf("%w: cost %d: want 0 to %d micro-tokens", ErrInvalid, c.Cost, int64(bucket.MaxMicro))
	}
	if c.Want < 0 || c.Want > bucket.MaxMicro || c.Want > 0 && (c.Share < 1 || c.Share > maxShare || c.Cost == 0 || c.Shadow) {
		return fmt.Errorf("%w: want %d, share %d: want 0 to %d micro-tokens, a share of 1 to %d, a cost and no shadow",
			ErrInvalid, c.Want, c.Share, int64(bucket.MaxMicro), maxShare)
	}
	grace := 0
	for i, l := range c.Limits {
		if err := validBucket(l.Scope, l.Spec); err != nil {
			return fmt.Errorf("%w: limits[%d]: %w", ErrInvalid, i, err)
		}
		for _, other := range c.Limits[:i] {
			if other.Scope == l.Scope {
				return fmt.Errorf("%w: limits[%d]: scope %q is named twice", ErrInvalid, i, l.Scope)
			}
		}
		if l.Spec.Grace > 0 {
			grace++
		}
	}
	if len(c.Seen) > 0 && len(c.Seen) != len(c.Limits) {
		return fmt.Errorf("%w: seen: %d of %d limits", ErrInvalid, len(c.Seen), len(c.Limits))
	}
	for i, seen := range c.Seen {
		if seen != (Seen{}) && (c.Limits[i].Spec.Kind != bucket.TokenBucket || !seen.valid()) {
			return fmt.Errorf("%w: seen[%d]: %+v: want a token bucket, as a decision told of it", ErrInvalid, i, seen)
		}
	}
	if grace > 1 {
		return fmt.Errorf("%w: limits: %d of them have grace, want at most 1", ErrInvalid, grace)
	}
	return nil
}

func (s Seen) valid() bool {
	return s.Gen > 0 && s.Gen <= maxSeq && s.Seq >= 0 && s.Seq <= maxSeq && s.Settled <= maxSeq && s.Time > 0 && s.Time <= maxSeq &&
		s.Tokens >= -bucket.MaxDebt && s.Tokens <= bucket.MaxMicro && s.Grace >= 0 && s.Grace <= bucket.MaxMicro
}

// maxShare bounds Check.Share.
const maxShare = 1 << 20

// Validate reports, as ErrInvalid, the first field that breaks Return's documentation.
func (r Return) Validate() error {
	if len(r.Limits) == 0 || len(r.Limits) > MaxLimits {
		return fmt.Errorf("%w: limits: %d, want 1 to %d", ErrInvalid, len(r.Limits), MaxLimits)
	}
	if r.Amount < 1 || r.Amount > bucket.MaxMicro {
		return fmt.Errorf("%w: amount %d: want 1 to %d micro-tokens", ErrInvalid, r.Amount, int64(bucket.MaxMicro))
	}
	for i, l := range r.Limits {
		if err := validBucket(l.Scope, l.Spec); err != nil {
			return fmt.Errorf("%w: limits[%d]: %w", ErrInvalid, i, err)
		}
		if l.Window < 0 || l.Window > maxSeq || l.Gen < 1 || l.Gen > maxSeq {
			return fmt.Errorf("%w: limits[%d]: window %d, gen %d: want them as the check said", ErrInvalid, i, l.Window, l.Gen)
		}
	}
	return nil
}

// Validate reports, as ErrInvalid, the first field that breaks Settlement's documentation.
func (s Settlement) Validate() error {
	if err := ValidateShard(s.Shard); err != nil {
		return err
	}
	switch {
	case s.Seq == 0 || s.Seq > maxSeq || s.N > maxSeq:
		return fmt.Errorf("%w: seq %d, n %d: want 1 ≤ seq, both below 2^53", ErrInvalid, s.Seq, s.N)
	case s.Stream == "":
		return fmt.Errorf("%w: stream is empty: name the response stream's incarnation", ErrInvalid)
	case s.Boot == "" && len(s.Items) > 0:
		return fmt.Errorf("%w: items without a boot: only an idle shard's settlement has none", ErrInvalid)
	}
	for i, it := range s.Items {
		if err := validBucket(it.Scope, it.Spec); err != nil {
			return fmt.Errorf("%w: items[%d]: %w", ErrInvalid, i, err)
		}
		if shard := ShardOf(it.Client); shard != s.Shard {
			return fmt.Errorf("%w: items[%d]: its client is of shard %d, the settlement of %d", ErrInvalid, i, shard, s.Shard)
		}
		if it.Delta < -bucket.MaxDebt || it.Delta > bucket.MaxDebt {
			return fmt.Errorf("%w: items[%d]: delta %d: want at most %d micro-tokens either way", ErrInvalid, i, it.Delta, int64(bucket.MaxDebt))
		}
		if it.Time < 0 || it.Time > maxSeq || it.Window < 0 || it.Window > maxSeq {
			return fmt.Errorf("%w: items[%d]: time %d, window %d: want 0 to 2^53", ErrInvalid, i, it.Time, it.Window)
		}
	}
	return nil
}

// Validate reports, as ErrInvalid, the first field that breaks Adjustment's documentation.
func (a Adjustment) Validate() error {
	if err := validBucket(a.Limit.Scope, a.Limit.Spec); err != nil {
		return fmt.Errorf("%w: limit: %w", ErrInvalid, err)
	}
	if a.Reset && a.Grant != 0 || !a.Reset && (a.Grant < 1 || a.Grant > bucket.MaxMicro) {
		return fmt.Errorf("%w: grant %d: want none with a reset, else 1 to %d micro-tokens", ErrInvalid, a.Grant, int64(bucket.MaxMicro))
	}
	return nil
}

// ValidateBegin reports, as ErrInvalid, arguments that Begin can't take.
func ValidateBegin(shard int, stream string, cursor uint64) error {
	if err := ValidateShard(shard); err != nil {
		return err
	}
	if stream == "" || cursor > maxSeq {
		return fmt.Errorf("%w: stream %q, cursor %d: want a name, and a cursor below 2^53", ErrInvalid, stream, cursor)
	}
	return nil
}

// maxSeq bounds what a script counts with: integers are exact in Lua to 2^53.
const maxSeq = 1<<53 - 1

// ValidateShard reports, as ErrInvalid, a number that is no shard's.
func ValidateShard(shard int) error {
	if shard < 0 || shard >= Shards {
		return fmt.Errorf("%w: shard %d: want 0 to %d", ErrInvalid, shard, Shards-1)
	}
	return nil
}

func validBucket(scope string, spec bucket.Spec) error {
	if scope == "" {
		return errors.New("scope is empty")
	}
	if (spec.Kind == bucket.DailyQuota) != (scope == bucket.ScopeDay) {
		return fmt.Errorf("scope %q, kind %q: a daily quota's scope is %q, and no other's", scope, spec.Kind, bucket.ScopeDay)
	}
	return spec.Validate()
}

package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/aegisrate/aegisrate/pkg/bucket"
)

var (
	// ErrUnavailable: the call did not run; nothing was changed.
	ErrUnavailable = errors.New("store: unavailable, the call did not run")
	// ErrFull is an ErrUnavailable of a store that is well but has no room for a new bucket.
	ErrFull = fmt.Errorf("%w: no room", ErrUnavailable)
	// ErrMoving is an ErrUnavailable of a store that is well but is moving the bucket to another node.
	ErrMoving = fmt.Errorf("%w: on its way to another node", ErrUnavailable)
	// ErrUnknown: the call may or may not have run (it timed out, or the connection broke after
	// it was sent). A Check counts as charged then; a Settle may be repeated.
	ErrUnknown = errors.New("store: no answer, the call may or may not have run")
	// ErrState: the stored state, or the answer, can't be read as what it should be.
	ErrState = errors.New("store: unreadable state")
)

// Shards is the number of shards S. A client's buckets all live in one shard, so
// that one script decides them together and Redis Cluster shards by client. It is
// fixed for the life of a deployment.
const Shards = 64

// MaxLimits bounds the limits of one Check.
const MaxLimits = 4

// Store decides requests and applies settlements, each in one atomic step on one
// clock, the store's own. Implementations: memstore (in process) and redisstore;
// storetest is the conformance suite that both pass.
//
// All methods are safe for concurrent use.
type Store interface {
	// Check decides one request against all its limits together: green charges every
	// limit, yellow only the one with Spec.Grace, red none; with Shadow, yellow and red
	// charge what is there, never below zero. A cost of 0 is a peek, which writes nothing.
	// Its errors are ErrUnavailable, ErrUnknown and ErrState; ErrInvalid for a call that
	// breaks Check's documentation.
	Check(ctx context.Context, c Check) (Decision, error)

	// Return gives back what Check granted and nobody spent: see Return. It must not be repeated: after
	// ErrUnknown it counts as done.
	Return(ctx context.Context, r Return) error

	// Settle applies what one stream message means for one shard, exactly once: see Settlement.
	// It is idempotent: after ErrUnknown it may be called again.
	Settle(ctx context.Context, s Settlement) (Settled, error)

	// Adjust changes one bucket on an administrator's word: see Adjustment. After ErrUnknown a reset may be
	// repeated; a grant that is may be given twice.
	Adjust(ctx context.Context, a Adjustment) (ItemState, error)

	// Meta reads a shard's settlement state; Epoch is "" where the shard has none.
	Meta(ctx context.Context, shard int) (Meta, error)

	// Begin gives a shard without an epoch one, and places its cursor: settlement
	// starts after cursor. In a shard of another stream it places the cursor too, and leaves the
	// rest: buckets, epoch and the counters of boots. It changes nothing in a shard of this stream,
	// and returns what is in force.
	Begin(ctx context.Context, shard int, stream string, cursor uint64) (Meta, error)

	// Rebase places the cursor of a shard of this stream anew, if it is at from: the stream was restored from a
	// backup, and counts on from less than was settled. All that it holds then counts as later than what was
	// settled; batches that were are known by their boot's counter. It returns what is in force.
	Rebase(ctx context.Context, shard int, stream string, from, cursor uint64) (Meta, error)
}

// Check is one request to decide.
type Check struct {
	// Client is the client id: any bytes, never a raw API key.
	Client string
	// Limits are decided together, at most MaxLimits, each naming another bucket.
	// At most one has a Spec.Grace above zero.
	Limits []Limit
	// Cost is K in micro-tokens, 0 to bucket.MaxMicro.
	Cost int64
	// Want is how much a green decision may take besides, for requests to come (a lease), in
	// micro-tokens; 0: nothing. Of each limit it takes at most what is left after Cost divided by
	// Share, at least 1, and whole costs only. Not for a peek, nor with Shadow.
	Want, Share int64
	// Shadow passes yellow and red.
	Shadow bool
	// Seen is what the caller saw last of each limit's bucket, in the order of Limits; nil, or a zero Seen
	// for one of them: nothing. Token buckets only.
	Seen []Seen
}

// Seen is a token bucket as an earlier LimitState told of it. Where the store holds another generation of the
// bucket, or an earlier change of the same, it has lost state, or the bucket had expired full. Then Check
// goes on from the lower of the two balances, what was seen being refilled to now, and from the grace and the
// settled that belong to it, and stores that also where it charges nothing. An administrator's reset is no loss.
type Seen struct {
	Gen, Seq int64
	Settled  uint64
	// Tokens and Grace were left at Time, Decision.Now; micro-tokens.
	Tokens, Grace, Time int64
}

// Limit is one bucket of the client and what it is limited to now.
type Limit struct {
	// Scope is a route's name, bucket.ScopePlan or bucket.ScopeDay.
	Scope string
	Spec  bucket.Spec
}

// Decision is the answer to a Check.
type Decision struct {
	Tier bucket.Tier
	// Now is the store's clock at the decision, Unix microseconds.
	Now int64
	// Granted is what was taken of Check.Want, of every limit alike.
	Granted int64
	// Until is how long the next such request is refused at the least, if nothing is given back, in
	// microseconds; 0: it is not; bucket.Never: for good.
	Until int64
	// Limits has the state of each limit after the decision, in the order of Check.Limits.
	Limits []LimitState
}

// LimitState is what one limit looks like after a decision.
type LimitState struct {
	// Tier is what this limit alone would have answered.
	Tier bucket.Tier
	// Remaining is the balance (token bucket; negative: debt) or the room left in the window or day, in micro-tokens.
	Remaining int64
	// Grace is what is left of the grace buffer, in micro-tokens.
	Grace int64
	// Wait is the time until Cost would be green by this limit if nothing more is charged, in
	// microseconds; 0 if it is now, bucket.Never if Cost is above the capacity.
	Wait int64
	// Reset is the time until the limit is whole again if nothing more is charged, in microseconds.
	Reset int64
	// Charged and GraceCharged are what the decision took, in micro-tokens; Granted is part of Charged.
	Charged, GraceCharged int64
	// Window is the window index or UTC day number charged; 0 for a token bucket.
	Window int64
	// Gen, Seq and Settled place the state in the bucket's history (docs/consistency.md):
	// creation time, changes since creation, last stream sequence settled into it. All are 0
	// for a bucket that is not stored, being full.
	Gen     int64
	Seq     int64
	Settled uint64
	// Healed says that the state had been lost, and goes on from Check.Seen.
	Healed bool
}

// Return gives Amount back to each bucket that a grant was charged to, never above its capacity, and
// in a window never below zero. A bucket that is gone, was made anew since, is kept under another
// algorithm by now or was cut to a lower capacity is left as it is: what was granted has no place there.
type Return struct {
	Client string
	// Amount is in micro-tokens, above 0.
	Amount int64
	// Limits name the buckets as the Check did, at most MaxLimits.
	Limits []Returned
}

// Returned is one bucket of a Return: Window and Gen are what LimitState said.
type Returned struct {
	Limit
	Window, Gen int64
}

// Settlement is what one message of the response stream means for one shard.
//
// The call is applied only if the shard's epoch exists and belongs to Stream, its
// cursor is at least Prev and below Seq, and N is above the shard's counter for
// Boot. Then every item is applied, and cursor and counter advance, in one step.
// With no Items and an empty Boot it only advances the cursor (an idle shard's).
type Settlement struct {
	Shard int
	// Stream identifies the response stream's incarnation.
	Stream string
	// Prev is the cursor the settler last saw, Seq the message's stream sequence.
	Prev, Seq uint64
	// Boot and N name the batch.
	Boot string
	N    uint64
	// Oldest is the first sequence the stream still holds; counters of boots whose last
	// message is older are dropped. 0: drop none.
	Oldest uint64
	Items  []Item
}

// Item is the summed change to one bucket; a settlement names a bucket once at most
// (once per Window where the bucket has windows).
type Item struct {
	Client string
	Scope  string
	// Spec applies where the bucket does not exist, and bounds refunds and debt.
	Spec bucket.Spec
	// Delta is what to take, in micro-tokens; negative gives back, never above capacity.
	// Its magnitude is at most bucket.MaxDebt.
	Delta int64
	// Window is the window or day that was charged.
	Window int64
	// Time is when the charge was made, Unix microseconds: a bucket that has since
	// expired (was full) is charged at Time and refilled to now.
	Time int64
}

// Adjustment is what an administrator does to one bucket: a reset, or a grant.
type Adjustment struct {
	Client string
	Limit  Limit
	// Reset makes the bucket whole, debt and grace included, as a new generation: what edges remember of
	// the old one says nothing about it. What is settled later still counts.
	Reset bool
	// Grant is what is given back, in micro-tokens, never above the capacity; 0 for a reset.
	Grant int64
}

// SettleStatus says what became of a settlement.
type SettleStatus string

const (
	// Applied: the items were applied and the cursor advanced.
	Applied SettleStatus = "applied"
	// Duplicate: the batch had been settled before under another sequence; only the cursor advanced.
	Duplicate SettleStatus = "duplicate"
	// Behind: the cursor was already at Seq or later (another settler); nothing changed.
	Behind SettleStatus = "behind"
	// Rewind: the cursor is before Prev, so the store went back in time; nothing changed.
	// Settlement must resume from Cursor.
	Rewind SettleStatus = "rewind"
	// Lost: the shard has no epoch, or another stream's; nothing changed.
	Lost SettleStatus = "lost"
)

// Settled is the answer to a Settlement.
type Settled struct {
	Status SettleStatus
	// Cursor is the shard's cursor after the call.
	Cursor uint64
	// Items has the state of each item's bucket after the call; empty unless Applied.
	Items []ItemState
}

// ItemState is a bucket after a settlement.
type ItemState struct {
	// Remaining is the balance or the room left, in micro-tokens; negative: debt.
	Remaining int64
	// Forgiven is the part of a debit that MaxDebt let off, in micro-tokens.
	Forgiven int64
	Gen, Seq int64
}

// Meta is a shard's settlement state.
type Meta struct {
	// Epoch is set once, when the shard's state begins; "" means there is none, or it was lost.
	Epoch string
	// Stream is the incarnation of the response stream that Cursor counts in.
	Stream string
	// Cursor is the last stream sequence settled into the shard.
	Cursor uint64
}

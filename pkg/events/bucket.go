package events

import "errors"

// BucketsChanged says that what edges remember of these buckets, leases and denials, no longer
// holds: a debt, a refund, or an administrator's reset, grant, raise or block. All its clients are
// of the shard that the subject names.
type BucketsChanged struct {
	Buckets []ChangedBucket `json:"buckets"`
}

// ChangedBucket is one bucket, or all of a client's.
type ChangedBucket struct {
	Client string `json:"client"`
	// Scope is a route's name, bucket.ScopePlan or bucket.ScopeDay; "": every bucket of the client.
	Scope string `json:"scope,omitempty"`
	// Why says which of the two still holds; "": neither does.
	Why ChangedWhy `json:"why,omitempty"`
}

// ChangedWhy is what happened to a bucket.
type ChangedWhy string

const (
	// ChangedDebt: it went below zero. Leases end; denials hold.
	ChangedDebt ChangedWhy = "debt"
	// ChangedGain: it has more than it had. Denials end; leases hold.
	ChangedGain ChangedWhy = "gain"
)

func (BucketsChanged) wireType() string { return "aegis.bucket.changed.v1" }

func (b BucketsChanged) valid() error {
	if len(b.Buckets) == 0 {
		return errors.New("there must be a bucket")
	}
	for _, c := range b.Buckets {
		if c.Client == "" {
			return errors.New("every bucket must name its client")
		}
	}
	return nil
}

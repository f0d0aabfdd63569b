package admission_test

import (
	"context"
	"net/http"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket/store"
	"github.com/aegisrate/aegisrate/pkg/bucket/store/memstore"
	"github.com/aegisrate/aegisrate/pkg/policy"
	"github.com/aegisrate/aegisrate/services/edge/admission"
)

// startTime is where every test's clock begins: noon of a UTC day, Unix microseconds.
const startTime = 1_699_963_200_000_000

// rig is an engine on stores whose clock the test moves.
type rig struct {
	*admission.Engine
	store   *probe
	now     atomic.Int64 // Unix microseconds
	records []admission.Record
}

// probe counts the calls to a store, and fails them when told to.
type probe struct {
	store.Store
	calls int
	last  store.Check
	fail  error
}

func (p *probe) Check(ctx context.Context, c store.Check) (store.Decision, error) {
	p.calls++
	p.last = c
	if p.fail != nil {
		return store.Decision{}, p.fail
	}
	return p.Store.Check(ctx, c)
}

func newRig(t testing.TB, doc string) *rig {
	t.Helper()
	r := &rig{}
	r.now.Store(startTime)
	r.store = &probe{Store: memstore.New(r.now.Load)}
	clock := func() time.Time { return time.UnixMicro(r.now.Load()) }
	storeClock := admission.NewStoreClock(clock)
	r.Engine = &admission.Engine{
		Identifier:  admission.Identifier{IPv6Bits: 64},
		Store:       r.store,
		Local:       memstore.New(storeClock.Micros),
		Clock:       storeClock,
		Breaker:     admission.NewBreaker(time.Now, nil),
		Fleet:       admission.NewFleet("this"),
		Multipliers: admission.NewMultipliers(clock),
		Sink:        r,
	}
	r.use(t, doc)
	return r
}

func (r *rig) use(t testing.TB, doc string) { r.Use(compile(t, doc)) }

func compile(t testing.TB, doc string) *policy.Table {
	t.Helper()
	table, err := compilePolicy(doc)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func compilePolicy(doc string) (*policy.Table, error) {
	p, err := policy.Parse([]byte(doc))
	if err != nil {
		return nil, err
	}
	return policy.Compile(p, 3)
}

// Add implements admission.Sink.
func (r *rig) Add(rec admission.Record) bool { r.records = append(r.records, rec); return true }

// ask decides a GET of path by the owner of key; "" is a client without one.
func (r *rig) ask(path, key string) admission.Decision {
	header := http.Header{}
	if key != "" {
		header.Set("X-API-Key", key)
	}
	return r.Decide(context.Background(), admission.Request{
		Method: "GET", Host: "edge.test", Path: path, Header: header, Peer: netip.MustParseAddr("192.0.2.1"),
	})
}

func (r *rig) wait(d time.Duration) { r.now.Add(d.Microseconds()) }

// doc is a policy of one upstream and these routes. Its users alice (plan small) and bob
// have the keys of their names, and root (key "root") is an admin.
func doc(routes string) string {
	return `
upstreams: {up: {url: "http://127.0.0.1:1"}}
routes:
` + routes + `
plans:
  small: {rate: 1, burst: 10, daily_quota: 12}
users:
  alice: {plan: small, key_hashes: [2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90]}
  bob: {key_hashes: [81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9]}
  root: {admin: true, key_hashes: [4813494d137e1631bba301d5acab6e7bb7aa74ce1185d456565ef51d737677b2]}
`
}

package proxy_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"net/http"
	"strconv"
	"testing"

	"github.com/dunglas/httpsfv"
	"github.com/google/go-cmp/cmp"
)

// item is one member of an IETF rate limit field.
type item struct {
	name   string
	params map[string]int64
}

// structured parses an IETF rate limit field, strictly, as a list of strings with whole numbers as parameters,
// and the partition key besides, which is every item's.
func structured(t *testing.T, h http.Header, field string) []item {
	t.Helper()
	var partition []byte
	list, err := httpsfv.UnmarshalList(h.Values(field))
	if err != nil {
		t.Fatalf("%s: %q: %v", field, h.Values(field), err)
	}
	var items []item
	for _, member := range list {
		i, ok := member.(httpsfv.Item)
		if !ok {
			t.Fatalf("%s: %T in the list", field, member)
		}
		got := item{params: make(map[string]int64)}
		if got.name, ok = i.Value.(string); !ok {
			t.Fatalf("%s: a name of %T", field, i.Value)
		}
		for _, key := range i.Params.Names() {
			v, _ := i.Params.Get(key)
			if key == "pk" {
				pk, ok := v.([]byte)
				if !ok || len(pk) != 9 || partition != nil && !bytes.Equal(pk, partition) {
					t.Fatalf("%s: %s;pk=%v", field, got.name, v)
				}
				partition = pk
				continue
			}
			n, ok := v.(int64)
			if !ok || n < 0 {
				t.Fatalf("%s: %s;%s=%v", field, got.name, key, v)
			}
			got.params[key] = n
		}
		if partition == nil {
			t.Fatalf("%s: %s has no partition key", field, got.name)
		}
		items = append(items, got)
	}
	return items
}

var compareItems = cmp.AllowUnexported(item{})

// Each family says the same in its own terms, and only those that the route names are there. The
// store's clock stands at testTime, a whole second.
func TestHeaderFamilies(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("RateLimit", `"upstream";r=999;t=1`)
		w.Header().Set("RateLimit-Policy", `"upstream";q=999;w=1`)
		w.Header().Set("X-RateLimit-Limit", "999")
		w.Header().Set("RateLimit-Remaining", "999")
	})
	const at = testTime / 1_000_000
	sum := sha256.Sum256([]byte("ip:127.0.0.1"))
	pk := ";pk=:" + base64.StdEncoding.EncodeToString(sum[:9]) + ":"
	for _, test := range []struct {
		family string
		after  int // requests before the one that is looked at
		status int
		want   map[string]string
	}{
		{"[ratelimit]", 0, 200, map[string]string{"Ratelimit-Limit": "5", "Ratelimit-Remaining": "4", "Ratelimit-Reset": "1"}},
		{"[x-ratelimit]", 0, 200, map[string]string{"X-Ratelimit-Limit": "5", "X-Ratelimit-Remaining": "4", "X-Ratelimit-Reset": strconv.Itoa(at + 1)}},
		{"[x-ratelimit]", 5, 202, map[string]string{"X-Ratelimit-Limit": "5", "X-Ratelimit-Remaining": "0", "X-Ratelimit-Reset": strconv.Itoa(at + 3)}},
		{"[x-ratelimit]", 6, 429, map[string]string{"X-Ratelimit-Limit": "5", "X-Ratelimit-Remaining": "0", "X-Ratelimit-Reset": strconv.Itoa(at + 3)}},
		{"[ietf]", 0, 200, map[string]string{"Ratelimit-Policy": `"api";q=5;w=3` + pk, "Ratelimit": `"api";r=4;t=1` + pk}},
		{"[ietf]", 6, 429, map[string]string{"Ratelimit-Policy": `"api";q=5;w=3` + pk, "Ratelimit": `"api";r=0;t=1` + pk}},
		{"[ietf, x-ratelimit, ratelimit]", 1, 200, map[string]string{
			"Ratelimit-Limit": "5", "Ratelimit-Remaining": "3", "Ratelimit-Reset": "1",
			"X-Ratelimit-Limit": "5", "X-Ratelimit-Remaining": "3", "X-Ratelimit-Reset": strconv.Itoa(at + 1),
			"Ratelimit-Policy": `"api";q=5;w=3` + pk, "Ratelimit": `"api";r=3;t=1` + pk,
		}},
	} {
		t.Run(test.family+" after "+strconv.Itoa(test.after), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 5", "refill_rate: 2", "headers: "+test.family)})
			for range test.after {
				r.get("/api")
			}
			res, body := r.get("/api")
			got := edgeHeaders(res.Header)
			for _, always := range []string{"X-Ratelimit-Tier", "X-Ratelimit-Algorithm", "X-Ratelimit-Adaptive-Multiplier"} {
				if got[always] == "" {
					t.Errorf("no %s", always)
				}
				delete(got, always)
			}
			delete(got, "Retry-After")
			delete(got, "X-Graceful-Degradation")
			if diff := cmp.Diff(test.want, got); res.StatusCode != test.status || diff != "" {
				t.Errorf("status %d, want %d; headers (-want +got):\n%s%s", res.StatusCode, test.status, diff, body)
			}
		})
	}
}

// The IETF fields tell of all limits of a client, and parse as structured fields.
func TestIETFHeadersTellEveryLimit(t *testing.T) {
	t.Parallel()
	url := upstream(t, func(http.ResponseWriter, *http.Request) {})
	r := newRig(t, rigConfig{policy: policyFor(url, "capacity: 20", "refill_rate: 10", "cost: 2", "headers: [ietf]") +
		"plans: {little: {rate: 0.5, burst: 3, daily_quota: 100}}\nanonymous_plan: little\n"})
	quotas := []item{
		{"api", map[string]int64{"q": 20, "w": 2}},
		{"@plan", map[string]int64{"q": 3, "w": 6}},
		{"@day", map[string]int64{"q": 100, "w": 86400}},
	}
	// testTime is 22:13:20 of its UTC day.
	const midnight = 86400 - (22*3600 + 13*60 + 20)
	for n, states := range [][]item{
		{{"api", map[string]int64{"r": 18, "t": 1}}, {"@plan", map[string]int64{"r": 1, "t": 2}}, {"@day", map[string]int64{"r": 98, "t": midnight}}},
		{{"api", map[string]int64{"r": 18, "t": 1}}, {"@plan", map[string]int64{"r": 1, "t": 2}}, {"@day", map[string]int64{"r": 98, "t": midnight}}},
	} {
		res, body := r.get("/api")
		if n == 1 && (res.StatusCode != 429 || res.Header.Get("Retry-After") != "2") {
			t.Fatalf("%d after %s: %s", res.StatusCode, res.Header.Get("Retry-After"), body)
		}
		if diff := cmp.Diff(quotas, structured(t, res.Header, "RateLimit-Policy"), compareItems); diff != "" {
			t.Errorf("request %d: RateLimit-Policy (-want +got):\n%s", n, diff)
		}
		if diff := cmp.Diff(states, structured(t, res.Header, "RateLimit"), compareItems); diff != "" {
			t.Errorf("request %d: RateLimit (-want +got):\n%s", n, diff)
		}
	}
}

// Whatever the cost, the algorithm, the debt and M: nothing is negative, and no refusal is to be tried
// again later than its limit is said to be whole.
func TestNumbersOfRefusals(t *testing.T) {
	t.Parallel()
	for _, quota := range [][]string{
		{"capacity: 5", "refill_rate: 0.3"},
		{"capacity: 3", "refill_rate: 1000"},
		{"sliding_limit: 3", "window_seconds: 7", "algorithm: sliding_window"},
	} {
		for _, cost := range []string{"1", "0.5", "3"} {
			url := upstream(t, func(http.ResponseWriter, *http.Request) {})
			r := newRig(t, rigConfig{policy: policyFor(url, append(quota, "cost: "+cost, "headers: [ratelimit, x-ratelimit, ietf]")...)})
			refused := 0
			for range 14 {
				res, _ := r.get("/api")
				number := func(name string) int64 {
					n, err := strconv.ParseInt(res.Header.Get(name), 10, 64)
					if err != nil || n < 0 {
						t.Errorf("%v %s: %s: %q", quota, cost, name, res.Header.Get(name))
					}
					return n
				}
				reset, at, left := number("RateLimit-Reset"), number("X-RateLimit-Reset"), number("RateLimit-Remaining")
				state := structured(t, res.Header, "RateLimit")[0].params
				if number("X-RateLimit-Remaining") != left || state["r"] != left || state["t"] > reset {
					t.Errorf("%v %s: the families differ: %v", quota, cost, edgeHeaders(res.Header))
				}
				if res.StatusCode == 200 {
					continue
				}
				refused++
				after := number("Retry-After")
				if after < 1 || reset < after || at < testTime/1_000_000+after || state["t"] != after {
					t.Errorf("%v %s: retry after %d, reset %d, at %d, t=%d", quota, cost, after, reset, at, state["t"])
				}
			}
			if refused == 0 {
				t.Errorf("%v %s: nothing was refused", quota, cost)
			}
		}
	}
}

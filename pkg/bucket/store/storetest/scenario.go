package storetest

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/bucket/store"
)

// Scenarios runs every text scenario in dir on a store of its own.
//
// A scenario is a file of lines; # starts a comment. Amounts are tokens, times are durations.
//
//	limit <scope> <kind> capacity=20 rate=10 window=60s grace max_debt=50 m=0.5
//	    defines or redefines a limit: as configured, at multiplier m. Its name is its scope.
//	clock +1.5s
//	    moves the clock; -1h moves it back
//	check <client> <cost> <scope>... -> green|yellow|red <scope>.<field>=<value>...
//	shadow <client> <cost> <scope>... -> ...
//	    fields: until and granted, and of each limit tier, remaining, grace, wait, reset ("never"), charged, grace_charged, seq, settled
//	lease <client> <cost> <want>/<share> <scope>... -> green granted=<value> <scope>.<field>=<value>...
//	return <client> <amount>
//	    gives back what the client's last lease was granted
//	settle <client> seq=1 prev=0 n=1 boot=b <scope>=<delta>[@<age>] ... -> applied <scope>.<field>=<value>...
//	    fields: remaining, forgiven, seq. age is how long ago the charge was made. prev is the
//	    cursor last seen where it is left out, n is seq, boot is b.
//	reset <client> <scope> -> remaining=<tokens> seq=<n>
//	grant <client> <scope> <tokens> -> remaining=<tokens> seq=<n>
//	stored <client> <scope> <kind> -> none | <field>=<value>... expires=<duration from now>
//	    fields as in Redis
func Scenarios(t *testing.T, dir string, open func(t testing.TB) Clocked) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios in %s: %v", dir, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			t.Parallel()
			f, err := os.Open(file)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			sc := &scenario{store: open(t), now: Epoch, limits: map[string]bucket.Spec{}, cursors: map[int]uint64{}, leases: map[string]store.Return{}}
			sc.store.SetClock(sc.now)
			lines := bufio.NewScanner(f)
			for n := 1; lines.Scan(); n++ {
				line, _, _ := strings.Cut(lines.Text(), "#")
				if line = strings.TrimSpace(line); line == "" {
					continue
				}
				if err := sc.run(t, line); err != nil {
					t.Fatalf("%s:%d: %s\n%v", file, n, line, err)
				}
			}
			if err := lines.Err(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

type scenario struct {
	store  Clocked
	now    int64
	limits map[string]bucket.Spec
	// cursors are the shards' as last seen.
	cursors map[int]uint64
	// leases are the clients' last.
	leases map[string]store.Return
}

func (sc *scenario) run(t *testing.T, line string) error {
	given, want, _ := strings.Cut(line, "->")
	words := strings.Fields(given)
	expect := strings.Fields(want)
	switch verb, args := words[0], words[1:]; verb {
	case "limit":
		return sc.limit(args)
	case "clock":
		d, err := time.ParseDuration(args[0])
		sc.now += d.Microseconds()
		sc.store.SetClock(sc.now)
		return err
	case "check", "shadow":
		return sc.check(t, args, store.Check{Shadow: verb == "shadow"}, expect)
	case "lease":
		want, share, _ := strings.Cut(args[2], "/")
		var c store.Check
		var err error
		if c.Want, err = micro(want); err != nil {
			return err
		}
		if c.Share, err = strconv.ParseInt(share, 10, 64); err != nil {
			return err
		}
		return sc.check(t, slices.Delete(slices.Clone(args), 2, 3), c, expect)
	case "return":
		r := sc.leases[args[0]]
		var err error
		if r.Amount, err = micro(args[1]); err != nil {
			return err
		}
		return sc.store.Return(t.Context(), r)
	case "settle":
		return sc.settle(t, args, expect)
	case "reset", "grant":
		return sc.adjust(t, args, expect)
	case "stored":
		return sc.stored(args, expect)
	default:
		return fmt.Errorf("unknown verb %q", verb)
	}
}

func (sc *scenario) adjust(t *testing.T, args, expect []string) error {
	a := store.Adjustment{Client: args[0], Limit: store.Limit{Scope: args[1], Spec: sc.limits[args[1]]}, Reset: len(args) == 2}
	if !a.Reset {
		var err error
		if a.Grant, err = micro(args[2]); err != nil {
			return err
		}
	}
	got, err := sc.store.Adjust(t.Context(), a)
	if err != nil {
		return err
	}
	if said := []string{"remaining=" + amount(got.Remaining), "seq=" + strconv.FormatInt(got.Seq, 10)}; !slices.Equal(said, expect) {
		return fmt.Errorf("got %v", said)
	}
	return nil
}

func (sc *scenario) limit(args []string) error {
	l := bucket.Limit{Kind: bucket.Kind(args[1])}
	m := int64(bucket.One)
	for _, arg := range args[2:] {
		name, value, _ := strings.Cut(arg, "=")
		var err error
		switch name {
		case "grace":
			l.Grace = true
		case "capacity":
			l.Capacity, err = strconv.ParseInt(value, 10, 64)
		case "rate":
			l.Rate, err = micro(value)
		case "max_debt":
			l.MaxDebt, err = micro(value)
		case "m":
			m, err = micro(value)
		case "window":
			var d time.Duration
			d, err = time.ParseDuration(value)
			l.Window = int64(d / time.Second)
		default:
			err = fmt.Errorf("unknown parameter %q", name)
		}
		if err != nil {
			return err
		}
	}
	sc.limits[args[0]] = bucket.Effective(l, m)
	return l.Validate()
}

func (sc *scenario) check(t *testing.T, args []string, c store.Check, expect []string) error {
	cost, err := micro(args[1])
	if err != nil {
		return err
	}
	c.Client, c.Cost = args[0], cost
	for _, scope := range args[2:] {
		c.Limits = append(c.Limits, store.Limit{Scope: scope, Spec: sc.limits[scope]})
	}
	d, err := sc.store.Check(t.Context(), c)
	if err != nil {
		return err
	}
	if d.Now != sc.now {
		return fmt.Errorf("decided at %d, the clock says %d", d.Now, sc.now)
	}
	got := map[string]string{"granted": amount(d.Granted), "until": wait(d.Until)}
	lease := store.Return{Client: c.Client}
	for i, l := range d.Limits {
		lease.Limits = append(lease.Limits, store.Returned{Limit: c.Limits[i], Window: l.Window, Gen: l.Gen})
		for field, value := range map[string]string{
			"tier":          l.Tier.String(),
			"remaining":     amount(l.Remaining),
			"grace":         amount(l.Grace),
			"wait":          wait(l.Wait),
			"reset":         wait(l.Reset),
			"charged":       amount(l.Charged),
			"grace_charged": amount(l.GraceCharged),
			"seq":           strconv.FormatInt(l.Seq, 10),
			"settled":       strconv.FormatUint(l.Settled, 10),
		} {
			got[args[2+i]+"."+field] = value
		}
	}
	if d.Granted > 0 {
		sc.leases[c.Client] = lease
	}
	return compare(d.Tier.String(), got, expect)
}

func (sc *scenario) settle(t *testing.T, args []string, expect []string) error {
	shard := store.ShardOf(args[0])
	st := store.Settlement{Shard: shard, Stream: "s", Boot: "b", Prev: sc.cursors[shard]}
	for _, arg := range args[1:] {
		name, value, _ := strings.Cut(arg, "=")
		var err error
		switch name {
		case "seq":
			st.Seq, err = strconv.ParseUint(value, 10, 64)
			st.N = st.Seq
		case "prev":
			st.Prev, err = strconv.ParseUint(value, 10, 64)
		case "n":
			st.N, err = strconv.ParseUint(value, 10, 64)
		case "boot":
			st.Boot = value
		default:
			delta, age, _ := strings.Cut(value, "@")
			it := store.Item{Client: args[0], Scope: name, Spec: sc.limits[name], Time: sc.now}
			if it.Delta, err = micro(delta); err != nil {
				return err
			}
			if age != "" {
				var d time.Duration
				d, err = time.ParseDuration(age)
				it.Time -= d.Microseconds()
			}
			switch it.Spec.Kind {
			case bucket.SlidingWindow:
				it.Window = it.Time / (it.Spec.Window * 1e6)
			case bucket.DailyQuota:
				it.Window = it.Time / 86_400e6
			}
			st.Items = append(st.Items, it)
		}
		if err != nil {
			return err
		}
	}
	if _, err := sc.store.Begin(t.Context(), st.Shard, "s", 0); err != nil {
		return err
	}
	s, err := sc.store.Settle(t.Context(), st)
	if err != nil {
		return err
	}
	sc.cursors[shard] = s.Cursor
	got := map[string]string{}
	for i, it := range s.Items {
		scope := st.Items[i].Scope
		got[scope+".remaining"] = amount(it.Remaining)
		got[scope+".forgiven"] = amount(it.Forgiven)
		got[scope+".seq"] = strconv.FormatInt(it.Seq, 10)
	}
	return compare(string(s.Status), got, expect)
}

func (sc *scenario) stored(args []string, expect []string) error {
	h := sc.store.Stored(ID{bucket.Kind(args[2]), args[1], args[0]})[0]
	if len(h.Fields) == 0 {
		return compare("none", nil, expect)
	}
	h.Fields["expires"] = (time.Duration(h.Expires)*time.Millisecond - time.Duration(sc.now)*time.Microsecond).String()
	return compare("", h.Fields, expect)
}

// compare checks that what is expected is there: a first word, unless it is "", and field=value pairs.
func compare(first string, got map[string]string, expect []string) error {
	if first != "" {
		if len(expect) == 0 || expect[0] != first {
			return fmt.Errorf("got %s, want %v; %v", first, expect, got)
		}
		expect = expect[1:]
	}
	for _, e := range expect {
		name, want, _ := strings.Cut(e, "=")
		value, ok := got[name]
		if !ok || value != want {
			var all []string
			for k, v := range got {
				all = append(all, k+"="+v)
			}
			slices.Sort(all)
			return fmt.Errorf("want %s, got %s=%s; all: %s", e, name, value, strings.Join(all, " "))
		}
	}
	return nil
}

// micro reads a decimal number of tokens (or a multiplier) exactly.
func micro(text string) (int64, error) {
	whole, fraction, _ := strings.Cut(text, ".")
	if len(fraction) > 6 {
		return 0, fmt.Errorf("%q: want at most six decimal places", text)
	}
	return strconv.ParseInt(whole+fraction+strings.Repeat("0", 6-len(fraction)), 10, 64)
}

// amount writes tokens without needless zeros.
func amount(micro int64) string {
	return strings.TrimSuffix(strings.TrimRight(tokens(micro), "0"), ".")
}

func wait(micro int64) string {
	if micro == bucket.Never {
		return "never"
	}
	return (time.Duration(micro) * time.Microsecond).String()
}

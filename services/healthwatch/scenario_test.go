package healthwatch

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/aegisrate/aegisrate/pkg/bucket"
	"github.com/aegisrate/aegisrate/pkg/events"
	"github.com/aegisrate/aegisrate/pkg/policy"
)

// TestScenarios runs the corpus of testdata; its README has the language.
func TestScenarios(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			s := scenario{m: bucket.One, window: window{}}
			s.use(t, map[string]any{"floor": 0.2})
			for n, line := range strings.Split(string(text), "\n") {
				if err := s.line(t, strings.Fields(line)); err != nil {
					t.Fatalf("%s:%d: %s: %v", file, n+1, line, err)
				}
			}
		})
	}
}

// scenario is one upstream under test.
type scenario struct {
	rules  policy.HealthRules
	window window
	m      int64
	stats  stats
	now    time.Duration

	rate, count     int
	latency, other  time.Duration
	failOf, failAll int // failOf of failAll requests fail
	every           int // every so-manieth takes other instead of latency; 0: none
}

// use takes the rules of a policy whose upstream has these health settings.
func (s *scenario) use(t *testing.T, health map[string]any) {
	t.Helper()
	doc, err := json.Marshal(map[string]any{"upstreams": map[string]any{"u": map[string]any{"url": "http://u", "health": health}}})
	if err != nil {
		t.Fatal(err)
	}
	p, err := policy.Parse(doc)
	if err != nil {
		t.Fatal(err)
	}
	table, err := policy.Compile(p, 1)
	if err != nil {
		t.Fatal(err)
	}
	s.rules = table.Upstreams()["u"].Health
	s.window.resize(s.rules.Window)
}

func (s *scenario) line(t *testing.T, words []string) error {
	if len(words) == 0 || strings.HasPrefix(words[0], "#") {
		return nil
	}
	switch args := words[1:]; words[0] {
	case "rules":
		health := map[string]any{}
		for _, a := range args {
			name, value, _ := strings.Cut(a, "=")
			health[name] = json.Number(value)
		}
		s.use(t, health)
		return nil
	case "traffic":
		return s.traffic(args)
	case "unreadable":
		return unreadable(args[0])
	case "refused":
		return refused(args[0])
	case "silence":
		s.rate = 0
		return nil
	case "M":
		return s.multipliers(args)
	case "stats":
		if got := fmt.Sprintf("samples=%d p95=%s errors=%.6g", s.stats.samples, time.Duration(s.stats.p95)*time.Microsecond,
			float64(s.stats.errorRate())/10_000); got != strings.Join(args, " ") {
			return fmt.Errorf("got %s", got)
		}
		return nil
	}
	return fmt.Errorf("unknown word %q", words[0])
}

// unreadable makes sure that a response with this field is no sample, since nobody can read it.
func unreadable(field string) error {
	_, err := events.Decode[events.ResponseBatch]([]byte(`{"type":"aegis.response.v1","boot":"b","n":1,"events":[` +
		`{"id":"x","client":"c","upstream":"u","time":1,"status":200,"outcome":"ok",` + field + `}]}`))
	if err == nil {
		return errors.New("it was read")
	}
	return nil
}

// refused makes sure that no policy has this health rule.
func refused(rule string) error {
	name, value, _ := strings.Cut(rule, "=")
	if _, err := policy.Parse([]byte("upstreams: {u: {url: 'http://u', health: {" + name + ": " + value + "}}}")); err == nil {
		return errors.New("it was taken")
	}
	return nil
}

func (s *scenario) traffic(args []string) (err error) {
	s.every, s.failOf, s.failAll, s.count = 0, 0, 1, 0
	if _, err = fmt.Sscanf(args[0], "%d/s", &s.rate); err != nil {
		return err
	}
	if s.latency, err = time.ParseDuration(args[1]); err != nil {
		return err
	}
	for _, a := range args[2:] {
		switch name, value, _ := strings.Cut(a, "="); name {
		case "fail":
			if _, err = fmt.Sscanf(value, "%d/%d", &s.failOf, &s.failAll); err != nil {
				return err
			}
		case "every":
			n, latency, _ := strings.Cut(value, ":")
			if s.every, err = strconv.Atoi(n); err != nil {
				return err
			}
			if s.other, err = time.ParseDuration(latency); err != nil {
				return err
			}
		default:
			return fmt.Errorf("unknown setting %q", name)
		}
	}
	return nil
}

// multipliers runs a second for each expected one.
func (s *scenario) multipliers(args []string) error {
	var want []float64
	for _, a := range args {
		times, ok := strings.CutPrefix(a, "x")
		if !ok {
			m, err := strconv.ParseFloat(a, 64)
			if err != nil {
				return err
			}
			want = append(want, m)
			continue
		}
		n, err := strconv.Atoi(times)
		if err != nil {
			return err
		}
		for range n - 1 {
			want = append(want, want[len(want)-1])
		}
	}
	for i, m := range want {
		s.second()
		if math.Abs(float64(s.m)/bucket.One-m) > 1e-6 {
			return fmt.Errorf("second %d of these: M %g, want %g (%+v)", i+1, float64(s.m)/bucket.One, m, s.stats)
		}
	}
	return nil
}

// second is an interval: its requests, evenly spread, and then a step.
func (s *scenario) second() {
	for i := range s.rate {
		s.count++
		p := sample{
			at:      (s.now + time.Second*time.Duration(i)/time.Duration(s.rate)).Microseconds(),
			latency: s.latency.Microseconds(),
			failed:  s.count%s.failAll < s.failOf,
		}
		if s.every > 0 && s.count%s.every == 0 {
			p.latency = s.other.Microseconds()
		}
		s.window.add(p)
	}
	s.now += time.Second
	s.window.age(s.now.Microseconds() - s.rules.MaxAge)
	s.stats = s.window.stats()
	s.m = step(s.m, s.stats, s.rules)
}

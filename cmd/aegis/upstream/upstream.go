package upstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

const (
	// maxDelay bounds what a caller may have an answer delayed by.
	maxDelay = 60 * time.Second
	// maxCost bounds the text of a cost, in bytes.
	maxCost = 64
)

// Faults is how broken the upstream is, on every endpoint below /api.
type Faults struct {
	// LatencyMS is added to every answer, in milliseconds, 0 to 60,000.
	LatencyMS int64 `json:"latency_ms"`
	// ErrorRate is the share of requests answered 503, 0 to 1.
	ErrorRate float64 `json:"error_rate"`
}

func (f Faults) validate() error {
	if f.LatencyMS < 0 || f.LatencyMS > maxDelay.Milliseconds() {
		return fmt.Errorf("latency_ms: want 0 to %d", maxDelay.Milliseconds())
	}
	if !(f.ErrorRate >= 0 && f.ErrorRate <= 1) {
		return errors.New("error_rate: want 0 to 1")
	}
	return nil
}

// Upstream answers the sample endpoints. Its zero value is not usable; see New.
type Upstream struct {
	mux    *http.ServeMux
	faults atomic.Pointer[Faults]
}

// New gives a whole upstream:
//
//	/api/fast             answers at once
//	/api/slow?ms=N        answers after N milliseconds (default 500)
//	/api/fail?status=N    answers N (default 500), to a share of requests with &rate=0..1
//	/api/cost?units=N     answers with X-Compute-Cost: N (default 5), sent as it was given
//	/v1/...               an OpenAI-compatible API, see llm.go
//	GET, PUT, POST /_control   Faults
//	/healthz              is fine whatever the faults
func New() *Upstream {
	u := &Upstream{mux: http.NewServeMux()}
	u.faults.Store(&Faults{})
	u.mux.Handle("/api/fast", u.faulty(u.fast))
	u.mux.Handle("/api/slow", u.faulty(u.slow))
	u.mux.Handle("/api/fail", u.faulty(u.fail))
	u.mux.Handle("/api/cost", u.faulty(u.cost))
	u.mux.Handle("GET /v1/models", u.faulty(u.models))
	u.mux.Handle("POST /v1/chat/completions", u.faulty(u.chat))
	u.mux.HandleFunc("GET /_control", u.show)
	u.mux.HandleFunc("PUT /_control", u.change)
	u.mux.HandleFunc("POST /_control", u.change)
	u.mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, map[string]any{"ok": true})
	})
	return u
}

// Set changes how broken the upstream is.
func (u *Upstream) Set(f Faults) error {
	if err := f.validate(); err != nil {
		return err
	}
	u.faults.Store(&f)
	return nil
}

func (u *Upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) { u.mux.ServeHTTP(w, r) }

// faulty applies the faults in force before an endpoint.
func (u *Upstream) faulty(endpoint http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		f := u.faults.Load()
		if !wait(r, time.Duration(f.LatencyMS)*time.Millisecond) {
			return
		}
		if f.ErrorRate > 0 && rand.Float64() < f.ErrorRate {
			refuse(w, http.StatusServiceUnavailable, errors.New("broken on purpose; see /_control"))
			return
		}
		endpoint(w, r)
	}
}

func (u *Upstream) fast(w http.ResponseWriter, _ *http.Request) {
	answer(w, http.StatusOK, map[string]any{"endpoint": "fast"})
}

func (u *Upstream) slow(w http.ResponseWriter, r *http.Request) {
	ms, err := number(r.URL.Query(), "ms", 500, 0, float64(maxDelay.Milliseconds()))
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	if wait(r, time.Duration(ms*float64(time.Millisecond))) {
		answer(w, http.StatusOK, map[string]any{"endpoint": "slow", "ms": ms})
	}
}

func (u *Upstream) fail(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	status, err := number(query, "status", http.StatusInternalServerError, 200, 599)
	if err == nil && status != float64(int(status)) {
		err = errors.New("status: want a whole number")
	}
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	rate, err := number(query, "rate", 1, 0, 1)
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	if rand.Float64() >= rate {
		status = http.StatusOK
	}
	answer(w, int(status), map[string]any{"endpoint": "fail", "status": int(status)})
}

// cost sends the units as they were given, so that one can see what the gateway
// makes of a cost such as "NaN" or "-5".
func (u *Upstream) cost(w http.ResponseWriter, r *http.Request) {
	units := "5"
	if r.URL.Query().Has("units") {
		units = r.URL.Query().Get("units")
	}
	if len(units) > maxCost || strings.ContainsFunc(units, func(c rune) bool { return c < ' ' || c > '~' }) {
		refuse(w, http.StatusBadRequest, fmt.Errorf("units: want at most %d printable ASCII characters", maxCost))
		return
	}
	w.Header().Set("X-Compute-Cost", units)
	answer(w, http.StatusOK, map[string]any{"endpoint": "cost", "units": units})
}

func (u *Upstream) show(w http.ResponseWriter, _ *http.Request) {
	answer(w, http.StatusOK, u.faults.Load())
}

func (u *Upstream) change(w http.ResponseWriter, r *http.Request) {
	var f Faults
	body := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<10))
	body.DisallowUnknownFields()
	err := body.Decode(&f)
	if err == nil && body.More() {
		err = errors.New("want one JSON object")
	}
	if err == nil {
		err = u.Set(f)
	}
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	u.show(w, r)
}

// wait reports whether d passed with the caller still there. It reads the
// request's body first, since only then does the server notice a caller that leaves.
func wait(r *http.Request, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	io.Copy(io.Discard, r.Body) // a body that breaks off ends the request's context
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-r.Context().Done():
		return false
	}
}

// number reads a query parameter that must lie in [least, most].
func number(query url.Values, name string, otherwise, least, most float64) (float64, error) {
	if !query.Has(name) {
		return otherwise, nil
	}
	v, err := strconv.ParseFloat(query.Get(name), 64)
	if err != nil || !(v >= least && v <= most) {
		return 0, fmt.Errorf("%s: want a number from %g to %g", name, least, most)
	}
	return v, nil
}

func refuse(w http.ResponseWriter, status int, err error) {
	answer(w, status, map[string]any{"error": err.Error()})
}

func answer(w http.ResponseWriter, status int, body any) {
	text, err := json.Marshal(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified {
		w.Write(append(text, '\n')) // the caller may be gone; nothing is left to do then
	}
}

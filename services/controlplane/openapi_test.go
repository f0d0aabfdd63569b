package controlplane

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"
	"github.com/go-chi/chi/v5"
)

// described is openapi.yaml, valid by itself.
var described = sync.OnceValues(func() (*openapi3.T, error) {
	doc, err := openapi3.NewLoader().LoadFromData(openAPI)
	if err != nil {
		return nil, err
	}
	return doc, doc.Validate(context.Background())
})

var describedRoutes = sync.OnceValues(func() (routers.Router, error) {
	doc, err := described()
	if err != nil {
		return nil, err
	}
	return gorillamux.NewRouter(doc)
})

// TestOpenAPINamesEveryOperation: the file has what the router has, and nothing else.
func TestOpenAPINamesEveryOperation(t *testing.T) {
	t.Parallel()
	doc, err := described()
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for path, item := range doc.Paths.Map() {
		for method := range item.Operations() {
			want = append(want, method+" "+path)
		}
	}
	if err := chi.Walk(new(Service).api(), func(method, path string, _ http.Handler, _ ...func(http.Handler) http.Handler) error {
		got = append(got, method+" "+path)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("served:\n%q\ndescribed:\n%q", got, want)
	}
}

// holdToOpenAPI fails the test when an answer is not what openapi.yaml says of it.
func holdToOpenAPI(t testing.TB, r *http.Request, status int, header http.Header, body string) {
	t.Helper()
	router, err := describedRoutes()
	if err != nil {
		t.Fatal(err)
	}
	probe := r.Clone(context.Background())
	probe.Body = http.NoBody
	route, params, err := router.FindRoute(probe)
	if err != nil || status == http.StatusRequestHeaderFieldsTooLarge {
		return // not of the API: a test of what is refused
	}
	err = openapi3filter.ValidateResponse(context.Background(), &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: probe, PathParams: params, Route: route},
		Status:                 status, Header: header, Body: io.NopCloser(bytes.NewBufferString(body)),
		Options: &openapi3filter.Options{IncludeResponseStatus: true},
	})
	if err != nil {
		t.Errorf("%s %s: the answer is not what openapi.yaml says: %v", r.Method, r.URL.Path, err)
	}
}

// Command testsum turns the output of `go test -json` into a summary that can be
// trusted: it prints a line for each package and the whole output of what failed,
// keeps the raw stream for later, and ends with the number of tests passed and
// failed. It exits with 1 when a test failed, was skipped, or when a package did
// not build or ended without a result; and when no test ran at all.
//
//	go test -json ./... 2>&1 | go run ./internal/testsum -keep DIR/unit.json
//	go run ./internal/testsum -total DIR/*.json
//
// With -total it sums up kept streams instead. A test that ran in several of them
// (once plain, once with -race) counts once, by its worst result.
package main

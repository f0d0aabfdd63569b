#!/usr/bin/env bash
# Runs the tests of every module but e2e, on a real Redis, and ends with their number.
#
#   scripts/test.sh                   all of them
#   scripts/test.sh race              with the race detector, where goroutines meet
#   scripts/test.sh all PATTERN...    only these packages (GOTESTFLAGS is passed on to go test)
#
# With RESULTS=DIR the raw stream is kept there, for `go run ./internal/testsum -total`.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

kind=${1:-all}
shift || true
flags=(-timeout=15m)
case $kind in
all)
	[ $# -gt 0 ] || mapfile -t pkgs < <(light_modules | patterns)
	;;
race)
	[ "$(go env CGO_ENABLED)" = 1 ] && have "$(go env CC)" || debian_install gcc libc6-dev ||
		die "the race detector needs cgo and a C compiler: install gcc, unset CGO_ENABLED"
	# TestSequence takes minutes so, on one goroutine; the plain run has it whole.
	flags+=(-race '-skip=^TestSequence$')
	# The pure packages have no goroutines, and their long property tests would run for minutes.
	[ $# -gt 0 ] || mapfile -t pkgs < <(light_modules | patterns | xargs go list |
		grep -vE '/(lua|pkg/bucket|pkg/policy|pkg/events|internal/[a-z]+)$')
	;;
*) die "usage: scripts/test.sh [all|race] [package pattern ...]" ;;
esac
[ $# -eq 0 ] || pkgs=("$@")

scripts/redis.sh
scripts/postgres.sh
mkdir -p .cache "${RESULTS:=.cache/results}"
go build -o .cache/testsum ./internal/testsum
# shellcheck disable=SC2086 # GOTESTFLAGS is a list of words
go test -json "${flags[@]}" ${GOTESTFLAGS:-} "${pkgs[@]}" 2>&1 | .cache/testsum -keep "$RESULTS/$kind.json"

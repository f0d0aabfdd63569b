#!/usr/bin/env bash
# Runs every benchmark COUNT times (default 6) into a file that benchstat reads.
#
#   scripts/bench.sh [FILE]      default .cache/bench.out
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

out=${1:-.cache/bench.out}
scripts/redis.sh
mkdir -p "$(dirname "$out")"
mapfile -t pkgs < <(light_modules | patterns)
# One package at a time: benchmarks that share the cores measure each other.
go test -p 1 -run='^$' -bench="${BENCH:-.}" -benchmem -count="${COUNT:-6}" -timeout=60m "${pkgs[@]}" | tee "$out" | grep -v 'no test files'
say "written to $out; compare two of them: go run golang.org/x/perf/cmd/benchstat@latest OLD NEW"

#!/usr/bin/env bash
# Runs every fuzz target for FUZZTIME (default 10s each), one after the other.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

scripts/redis.sh
found=
while IFS=: read -r file target; do
	found=1
	say "fuzz: $target in $(dirname "$file")"
	(cd "$(dirname "$file")" && go test -run='^$' -fuzz="^$target\$" -fuzztime="${FUZZTIME:-10s}" -fuzzminimizetime=1s -parallel="${FUZZPROCS:-2}" .)
done < <(git ls-files -co --exclude-standard '*_test.go' | xargs grep -oE '^func Fuzz[A-Za-z0-9_]+' /dev/null | sed 's/func //')
[ -n "$found" ] || die "found no fuzz target"

#!/usr/bin/env bash
# Runs every fuzz target for FUZZTIME (default 10s each), one after the other.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

scripts/redis.sh
mkdir -p .cache
log=$root/.cache/fuzz.log

# fuzz FOLDER TARGET runs one target; its output is in the log too.
fuzz() {
	(cd "$1" && go test -run='^$' -fuzz="^$2\$" -fuzztime="${FUZZTIME:-10s}" -fuzzminimizetime=1s -parallel="${FUZZPROCS:-2}" .) 2>&1 | tee "$log"
}

found=
while IFS=: read -r file target; do
	found=1
	say "fuzz: $target in $(dirname "$file")"
	# Go's fuzzer at times takes the end of its time for a failure, of no input: then again, twice at the most.
	for attempt in 1 2 3; do
		! fuzz "$(dirname "$file")" "$target" || continue 2
		if ! grep -qx ' *context deadline exceeded' "$log" || grep -q 'Failing input' "$log" || [ "$attempt" = 3 ]; then
			die "$target failed"
		fi
	done
done < <(git ls-files -co --exclude-standard '*_test.go' | xargs grep -oE '^func Fuzz[A-Za-z0-9_]+' /dev/null | sed 's/func //')
[ -n "$found" ] || die "found no fuzz target"

#!/usr/bin/env bash
# Everything that can be found by looking: formatting, go vet of every module alone (GOWORK=off),
# staticcheck, tidy go.mod files, the import rules, Lua, shell.
#
#   scripts/lint.sh            all of it; goes on after a failure, so that one run shows all
#   scripts/lint.sh fmt vet    only these
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

staticcheck=honnef.co/go/tools/cmd/staticcheck@v0.8.2

fmt() {
	local bad
	bad=$(git ls-files -co --exclude-standard '*.go' | while read -r f; do [ ! -f "$f" ] || echo "$f"; done | xargs gofmt -l)
	[ -z "$bad" ] || die "not formatted; run gofmt -w on: $bad"
}

vet() {
	local m
	for m in $(modules); do
		(cd "$m" && GOWORK=off go vet ./...) || { echo "in module $m, by itself (GOWORK=off)" >&2; return 1; }
	done
}

static() { modules | patterns | xargs go run "$staticcheck"; }

tidy() {
	local m bad=
	for m in $(modules); do
		(cd "$m" && GOWORK=off go mod tidy -diff) || bad="$bad $m"
	done
	[ -z "$bad" ] || die "go.mod or go.sum is not tidy; run GOWORK=off go mod tidy in:$bad"
}

arch() { go test ./internal/archtest; }

lua() {
	have luacheck || debian_install lua-check || die "luacheck is missing: install Debian's lua-check, or luarocks install luacheck"
	# Scripts are checked as Redis runs them, with their library in front; line numbers are those of the copies.
	local s name
	mkdir -p .cache/lua
	for s in lua/*.lua; do
		name=$(basename "$s" .lua)
		go run ./internal/luacat "$name" >".cache/lua/$name.lua" || return 1
	done
	luacheck --quiet .cache/lua
}

# Not everybody has shellcheck; bash itself finds what does not parse.
shell() {
	local f
	for f in .ci/run scripts/*.sh; do bash -n "$f" || return 1; done
	! have shellcheck || shellcheck -x -P SCRIPTDIR .ci/run scripts/*.sh
}

if [ $# -eq 0 ]; then
	set -- fmt vet static tidy arch lua shell
fi
failed=
for check in "$@"; do
	say "lint: $check"
	# A subshell, so that a check's exit ends the check; -e is off in a condition, hence the explicit status.
	set +e
	(set -e; "$check")
	status=$?
	set -e
	[ $status = 0 ] || failed="$failed $check"
done
[ -z "$failed" ] || die "lint failed:$failed"

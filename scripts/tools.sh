#!/usr/bin/env bash
# Installs what a whole run of .ci/run needs beyond Go, on Debian as root; elsewhere says what is missing.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

have go || die "Go $(sed -n 's/^go //p' go.work) or later is not on PATH: https://go.dev/dl/"

missing=()
have redis-server || missing+=(redis-server redis-tools)
have luacheck || missing+=(lua-check)
have docker || missing+=(docker.io)
have debootstrap || missing+=(debootstrap)
have "$(go env CC)" || missing+=(gcc libc6-dev)
have curl || missing+=(curl ca-certificates)
if [ ${#missing[@]} -gt 0 ]; then
	say "installing ${missing[*]}"
	debian_install "${missing[@]}" || die "could not install: ${missing[*]}"
fi

if ! docker info >/dev/null 2>&1; then
	{ [ "$(id -u)" = 0 ] && have dockerd; } || die "the Docker daemon is not running"
	say "starting dockerd; its log is .cache/dockerd.log"
	mkdir -p .cache
	setsid nohup dockerd >.cache/dockerd.log 2>&1 </dev/null &
	for _ in $(seq 60); do
		! docker info >/dev/null 2>&1 || exit 0
		sleep 0.5
	done
	tail -20 .cache/dockerd.log >&2
	die "dockerd did not come up in 30 s"
fi

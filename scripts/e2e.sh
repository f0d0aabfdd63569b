#!/usr/bin/env bash
# Tests the compose stack in containers: makes base images, binaries, service images and the
# stock nats CLI, then runs e2e/. Needs Docker. Whatever was started is removed at the end.
#
#   scripts/e2e.sh                    everything
#   scripts/e2e.sh -run Scaling       arguments go to go test
#
# With RESULTS=DIR the raw stream is kept there, for `go run ./internal/testsum -total`.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

cli_version=v0.5.0
export AEGIS_E2E_NATS_CLI=$root/.cache/bin/nats-$cli_version

{ have docker && docker info >/dev/null 2>&1; } || die "Docker does not answer: start it (dockerd) and try again"

say "base images"
scripts/compose.sh version >/dev/null
scripts/images.sh redis nats haproxy

say "binaries"
scripts/binaries.sh
if [ ! -x "$AEGIS_E2E_NATS_CLI" ]; then
	bin=$(mktemp -d)
	GOBIN=$bin GOWORK=off CGO_ENABLED=0 go install -trimpath "github.com/nats-io/natscli/nats@$cli_version"
	mkdir -p .cache/bin
	mv "$bin/nats" "$AEGIS_E2E_NATS_CLI"
	rmdir "$bin"
fi

say "service images"
log=.cache/e2e-build.log
BIN=prebuilt AEGIS_TAG=e2e scripts/compose.sh --env-file /dev/null -f deploy/compose.yaml --progress plain build >"$log" 2>&1 ||
	{ tail -n 30 "$log" >&2; die "building the images failed; see $log"; }

# The tests tear their project down themselves; this is for when they could not.
export AEGIS_E2E_PROJECT=aegis-e2e-$$
sweep() {
	local of=label=com.docker.compose.project=$AEGIS_E2E_PROJECT
	docker ps -aq --filter "$of" | xargs -r docker rm -fv
	docker ps -aq --filter "label=io.aegisrate.e2e=$AEGIS_E2E_PROJECT" | xargs -r docker rm -fv
	docker volume ls -q --filter "$of" | xargs -r docker volume rm -f
	docker network ls -q --filter "$of" | xargs -r docker network rm
} >/dev/null 2>&1
trap sweep EXIT

say "tests"
# testcontainers: no reaper image (the sweep does that), and do not take this machine for a container.
export TESTCONTAINERS_RYUK_DISABLED=true TESTCONTAINERS_HOST_OVERRIDE=127.0.0.1
mkdir -p "${RESULTS:=.cache/results}"
go build -o .cache/testsum ./internal/testsum
cd e2e
GOWORK=off go test -json -count=1 -timeout=20m "$@" ./... 2>&1 | ../.cache/testsum -keep "$(cd .. && realpath -m "$RESULTS")/e2e.json"

#!/usr/bin/env bash
# Runs Docker Compose v2: the installed plugin, else one built from its Go module
# into .cache/ (once; 3 to 4 minutes). Arguments go to compose.
set -euo pipefail

version=v2.40.3
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cached=$root/.cache/bin/docker-compose-$version

if docker compose version >/dev/null 2>&1; then
  exec docker compose "$@"
fi
if [[ ! -x $cached ]]; then
  echo "compose.sh: no docker compose plugin; building $version from its module" >&2
  work=$(mktemp -d)
  trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
  (
    cd "$work"
    export GOWORK=off GOFLAGS=-buildvcs=false CGO_ENABLED=0
    dir=$(go mod download -json "github.com/docker/compose/v2@$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    # A copy, since the module cache is read-only and compose's own go.mod must rule.
    cp -R "$dir" src && chmod -R u+w src && cd src
    mkdir -p "$root/.cache/bin"
    go build -trimpath -ldflags "-s -w -X github.com/docker/compose/v2/internal.Version=$version" -o "$cached.new" ./cmd
    mv "$cached.new" "$cached"
  ) >&2
fi
exec "$cached" "$@"

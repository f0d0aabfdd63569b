#!/usr/bin/env bash
# Builds the static binaries that the images hold, with what else they need, into a
# directory (default bin/). Runs on the host and inside deploy/Dockerfile's build stage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1:-bin}")
mkdir -p "$out/data"

# Each module alone, so that its go.mod says what is in the binary, whatever else the workspace holds.
export CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOWORK=off
for service in edge settler healthwatch controlplane; do
  go -C "services/$service" build -trimpath -ldflags '-s -w' -o "$out/$service" "./cmd/$service"
done
go -C cmd/aegis build -trimpath -ldflags "-s -w -X main.version=${VERSION:-dev}" -o "$out/aegis" .

for bundle in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
  [[ -f $bundle ]] || continue
  cp "$bundle" "$out/ca-certificates.crt"
  exit 0
done
echo "binaries.sh: no CA bundle found: set SSL_CERT_FILE" >&2
exit 1

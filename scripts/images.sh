#!/usr/bin/env bash
# Makes sure that the public base images named in deploy/ are there: those that are
# missing are pulled, and where that fails a stand-in of the same name is built from
# deploy/standin/. An image that was pulled is never touched; a stand-in is rebuilt
# only when its recipe changes.
#
#   scripts/images.sh              every image but postgres, which only a profile needs
#   scripts/images.sh redis nats   these only (names without tags)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

label=io.aegisrate.standin # its value identifies the recipe
base=debian:bookworm-slim
nats_version=$(sed -n 's|^\tgithub.com/nats-io/nats-server/v2 ||p' go.mod)
cache=$PWD/.cache/standin
offline=

say() { printf 'images: %s\n' "$*"; }
die() { printf 'images: %s\n' "$*" >&2; exit 1; }

images() {
  sed -n 's/^ *image: \([a-z]*:[^ ]*\)$/\1/p' deploy/compose.yaml
  sed -n 's/^FROM \(golang:[^ ]*\).*/\1/p' deploy/Dockerfile
}

exists() { docker image inspect "$1" >/dev/null 2>&1; }

recipe_of() { docker image inspect --format "{{index .Config.Labels \"$label\"}}" "$1" 2>/dev/null || true; }

# pull gives up at once without a network, and after 20 s without a first answer.
pull() {
  [[ -z $offline ]] || return 1
  local log pid i
  log=$(mktemp)
  docker pull "$1" >"$log" 2>&1 &
  pid=$!
  for ((i = 0; i < 200; i++)); do
    kill -0 "$pid" 2>/dev/null || break
    ! grep -q 'Pulling from' "$log" || break
    sleep 0.1
  done
  if grep -q 'Pulling from' "$log" || ! kill -0 "$pid" 2>/dev/null; then
    if wait "$pid"; then rm -f "$log"; return 0; fi
  else
    kill "$pid" 2>/dev/null || true
  fi
  say "cannot pull $1 ($(tail -n 1 "$log" | cut -c -160))"
  grep -q 'Pulling from' "$log" || offline=1
  rm -f "$log"
  return 1
}

# base_image makes a minimal Debian under the name that the stand-ins start from.
base_image() {
  if exists "$base" || pull "$base"; then return 0; fi
  [[ $(id -u) == 0 ]] || die "no $base, and debootstrap needs root: run 'sudo scripts/images.sh' once"
  if ! command -v debootstrap >/dev/null; then
    command -v apt-get >/dev/null || die "no $base and no debootstrap: connect to an image registry or install debootstrap"
    apt-get install -y --no-install-recommends debootstrap >/dev/null
  fi
  say "building $base by debootstrap (about a minute)"
  local dir
  dir=$(mktemp -d)
  debootstrap --variant=minbase bookworm "$dir" >"$cache/debootstrap.log" 2>&1 ||
    { rm -rf "$dir"; die "debootstrap failed; see $cache/debootstrap.log"; }
  rm -rf "$dir"/var/cache/apt/archives/*.deb "$dir"/var/lib/apt/lists/* "$dir"/usr/share/{doc,man,locale}/*
  # No package caches in the images that start from this one; security updates too.
  printf 'Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\nAPT::Keep-Downloaded-Packages "false";\n' >"$dir/etc/apt/apt.conf.d/90image"
  # debootstrap has written the mirror it used, for the release alone.
  local sources=$dir/etc/apt/sources.list release
  release=$(<"$sources")
  printf '%s\n' "${release/ bookworm / bookworm-updates }" "${release/\/debian bookworm /\/debian-security bookworm-security }" >>"$sources"
  tar -C "$dir" --numeric-owner -c . | docker import --change "LABEL $label=debootstrap" --change 'CMD ["bash"]' - "$base" >/dev/null
  rm -rf "$dir"
}

# context puts what a recipe copies beside it.
context() {
  local name=$1 dir=$2
  case $name in
  nats)
    GOBIN=$dir GOWORK=off GOFLAGS=-buildvcs=false CGO_ENABLED=0 go install -trimpath -ldflags '-s -w' "github.com/nats-io/nats-server/v2@$nats_version"
    ;;
  golang)
    cp -R "$(go env GOROOT)" "$dir/go"
    local bundle
    for bundle in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
      if [[ -f $bundle ]]; then cp "$bundle" "$dir/ca-certificates.crt"; return; fi
    done
    die "no CA bundle found for the golang stand-in: set SSL_CERT_FILE"
    ;;
  esac
}

standin() {
  local image=$1 recipe=$2 name=${1%%:*} dir start=$SECONDS
  base_image
  say "building a stand-in for $image"
  dir=$(mktemp -d "$cache/$name.XXXXXX")
  cp "deploy/standin/$name/Dockerfile" "$dir"
  context "$name" "$dir"
  # The recipes are plain enough for either builder.
  if ! docker build --label "$label=$recipe" -t "$image" "$dir" >"$cache/$name.log" 2>&1; then
    rm -rf "$dir"
    die "building $image failed; see $cache/$name.log"
  fi
  rm -rf "$dir"
  say "$image is ready ($((SECONDS - start)) s)"
}

docker info >/dev/null 2>&1 || die "Docker does not answer: start it (dockerd) and try again"
mkdir -p "$cache"
for image in $(images | sort -u); do
  name=${image%%:*}
  if (($#)) && [[ " $* " != *" $name "* ]]; then continue; fi
  # Of a profile, so it is not everybody's to wait for.
  if ! (($#)) && [[ $name == postgres ]]; then continue; fi
  recipe=$({ cat "deploy/standin/$name/Dockerfile"; case $name in nats) echo "$nats_version" ;; golang) go version ;; esac; } | sha256sum | cut -c -16)
  have=$(recipe_of "$image")
  if exists "$image" && [[ -z $have || $have == "$recipe" ]]; then
    say "$image is there${have:+ (stand-in)}"
  elif [[ -n $have ]] || ! pull "$image"; then
    standin "$image" "$recipe"
  else
    say "$image pulled"
  fi
done

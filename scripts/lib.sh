# Sourced by the other scripts: where the root is, which modules there are, and how a tool gets here.
# shellcheck shell=bash
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

say() { printf '\033[1m== %s\033[0m\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# modules prints the folder of every module of go.work, relative to the root.
modules() { go work edit -json | sed -n 's/.*"DiskPath": "\(.*\)".*/\1/p'; }

# light_modules leaves out e2e, whose libraries are heavy and whose tests need Docker; not e2e/openai, which needs neither.
light_modules() { modules | grep -vx './e2e'; }

# patterns turns module folders into package patterns.
patterns() { sed 's|$|/...|'; }

# have reports whether a command is on PATH.
have() { command -v "$1" >/dev/null 2>&1; }

# debian_install installs Debian packages when that is possible without asking anybody: as root, with apt-get.
debian_install() {
	have apt-get && [ "$(id -u)" = 0 ] || return 1
	if [ -z "${apt_updated:-}" ]; then
		apt-get update -qq >&2 || return 1
		apt_updated=1
	fi
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

#!/usr/bin/env bash
# Makes sure that tests will find a real Redis: the one AEGIS_TEST_REDIS_URL names, else redis-server
# on PATH, else Debian's package (as root), else Docker, in which the tests start a container.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ -n "${AEGIS_TEST_REDIS_URL:-}" ] || have redis-server; then
	exit 0
fi
say "redis-server is not on PATH: installing it"
# A package's daemon must not start: the tests start their own.
if debian_install redis-server redis-tools && have redis-server; then
	exit 0
fi
if have docker && docker info >/dev/null 2>&1; then
	say "could not install redis-server: the tests will start it in a container"
	exit 0
fi
die "the tests need a Redis server (7.0 or later). Install redis-server, or start Docker, or set AEGIS_TEST_REDIS_URL=redis://host:port/0 to one that they may flush."

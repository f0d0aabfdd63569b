#!/usr/bin/env bash
# Makes sure that tests will find PostgreSQL's programs: on PATH, where Debian puts them, else from Debian's
# package (as root). Tests start private servers; no daemon is started here.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

there() { have initdb || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; }
if there; then
	exit 0
fi
say "PostgreSQL is not here: installing it"
if [ "$(id -u)" = 0 ] && [ -d /etc ]; then
	mkdir -p /etc/postgresql-common
	[ -e /etc/postgresql-common/createcluster.conf ] || echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
fi
debian_install postgresql && there && exit 0
die "the tests need PostgreSQL (14 or later): install it (apt-get install postgresql), so that initdb is on PATH."

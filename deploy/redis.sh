#!/bin/sh
# Starts Redis with a user a service (redis-users.acl). Passwords come from the environment and are in no
# command line and no file; they must have neither spaces nor quotes. The default user is the administrator's.
set -eu
users=$(cat /etc/redis-users.acl)
for name in EDGE SETTLER CONTROLPLANE; do
	eval "password=\$AEGIS_REDIS_${name}_PASSWORD"
	users=$(printf '%s\n' "$users" | sed "s|\$AEGIS_REDIS_${name}_PASSWORD|$password|")
done
exec redis-server - <<EOF
$(cat /etc/redis.conf)
requirepass $AEGIS_REDIS_PASSWORD
$users
EOF

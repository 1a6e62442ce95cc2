#!/bin/sh
# Makes the passwords and DSNs of deploy/compose.yaml. Never changes existing files.
#
# The folder is closed to other users (700). The files in it are readable (644), because compose mounts them with their
# modes, and the containers read them as users that do not exist on the host.
set -eu
folder=${1:-$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)/secrets}
umask 077
mkdir -p "$folder"
chmod 700 "$folder"

password() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
keep() {
    if [ -e "$folder/$1" ]; then
        echo "$folder/$1 exists; it is not changed"
    else
        printf '%s\n' "$2" >"$folder/.new"
        chmod 644 "$folder/.new"
        mv "$folder/.new" "$folder/$1"
    fi
}

for shard in shard1 shard2; do
    keep "${shard}_superuser" "$(password)"
    keep "${shard}_password" "$(password)"
    keep "${shard}_dsn" "postgresql://windrow:$(cat "$folder/${shard}_password")@$shard:5432/windrow"
done
keep grafana_password "$(password)"

#!/usr/bin/env bash
# Makes the key between proxy and nodes for compose.yaml, in deploy/secrets/cluster_key (or FILE), unless it is there.
#
#   bash deploy/secrets.sh [FILE]
set -euo pipefail
case "${1:-}" in
    -*)
        echo "usage: bash deploy/secrets.sh [FILE]" >&2
        exit 2
        ;;
esac
file=${1:-"$(dirname "${BASH_SOURCE[0]}")/secrets/cluster_key"}
if [ -s "$file" ]; then
    echo "$file is there already; to make another, remove it and start everything again"
    exit 0
fi
folder=$(dirname "$file")
# The images' user, 10001, reads it through a mount; from others on this machine its folder keeps it. The mode is for a
# folder made here: one that is there already has uses of its own.
mkdir -p -m 700 "$folder"
if [ -n "$(find "$folder/" -maxdepth 0 -perm /077)" ]; then
    echo "note: $folder is open to others on this machine, who can read the key there" >&2
fi
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$file"
chmod 644 "$file"
echo "made $file"

#!/usr/bin/env bash
# Runs the images, compose.yaml and the Kubernetes manifests in real containers, with docker, or buildah and podman.
#
#   bash deploy/check.sh                                what this machine can; --help lists the options
#   bash deploy/check.sh --debootstrap bookworm         on a base image made of Debian's packages (needs root)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
exec "$python" deploy/check/main.py "$@"

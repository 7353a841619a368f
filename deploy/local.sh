#!/usr/bin/env bash
# Install into .venv when needed, then start proxy + prefill node + decode node on this machine.
# Arguments go to `tandem up`. Another Python: PYTHON=/path/to/python3.12 bash deploy/local.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. deploy/venv.sh
ensure_venv node,images
exec .venv/bin/tandem up "$@"

#!/usr/bin/env bash
# The checks that CI runs: ruff, mypy and the tests, in this checkout's .venv (made and filled when needed).
#
#   bash tests/run.sh                 style, types, and the tests but those marked `full`
#   bash tests/run.sh --all           the whole matrix
#   bash tests/run.sh [--all] ARGS    ARGS go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. deploy/venv.sh

markers="not full"
if [ "${1:-}" = "--all" ]; then
    markers=""
    shift
fi

# The workers, and the processes that tests start, import the same files: each is compiled once.
unset PYTHONDONTWRITEBYTECODE
ensure_venv node,test

# One thread per process: the tests start several. Nothing is fetched from a model hub.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# A developer's own settings would change what is tested.
for variable in ${!TANDEM_@}; do unset "$variable"; done
is_new=$([ -d tests/__pycache__ ] || echo yes)

.venv/bin/ruff check .
.venv/bin/ruff format --check .
# The types are checked meanwhile: the tests wait often.
types_log=$(mktemp)
.venv/bin/python -m mypy >"$types_log" 2>&1 &
types=$!
trap 'kill "$types" 2>/dev/null || true; rm -f "$types_log"' EXIT
status=0
# In a new checkout one process makes the byte code of these tests and of what they import, and not every worker.
[ -z "$is_new" ] || .venv/bin/python -m pytest --collect-only -q "$@" >/dev/null || true
# Four workers, for tests wait often: two have the tests that start services, and all else is for who is free (tests/conftest.py).
.venv/bin/python -m tests.support.forked_workers 4 -m "$markers" "$@" || status=$?
if [ -z "$markers" ] && [ $# -eq 0 ]; then
    # Again on devices whose memory is late (tests/support/late_device.py).
    LATE_DEVICE=1 .venv/bin/python -m pytest -m "not full" tests/e2e/test_{identity,pipelining,two_turns}.py tests/e2e/test_fa{ilures_matrix,ults_*}.py || status=$?
    # Images, compose.yaml and manifests in containers; 77: this machine cannot, its last line says why.
    bash deploy/check.sh || { code=$?; [ "$code" -eq 77 ] || status=$code; }
fi
wait "$types" || status=$?
cat "$types_log"
exit "$status"

#!/usr/bin/env bash
# What the GPU backend does on this machine's GPU, in at most ten minutes: a JSON file and a Markdown table.
#
#   bash benchmarks/gpu.sh                               everything
#   bash benchmarks/gpu.sh --only ops decode --seconds 300 --out DIR
#   bash benchmarks/gpu.sh --smoke                       the same program on anything, also a CPU, tiny
#
# It installs nothing: the interpreter is $PYTHON, else this checkout's .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "${PYTHON:-.venv/bin/python}" -m benchmarks.gpu "$@"

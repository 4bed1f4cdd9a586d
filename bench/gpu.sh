#!/usr/bin/env bash
# gpu.sh: what only a machine with a GPU can tell, in ten minutes at most; without one it says so in a line.
# PYTHON names the interpreter where there is no .venv; it needs what requirements/engine.txt lists, numpy and rich.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
export PYTHONPATH="$PWD:$PWD/engine${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=10 600 "$python" -m bench.gpu "$@"

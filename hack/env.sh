#!/usr/bin/env bash
# env.sh: makes .venv from requirements/dev.txt (hash-checked) and installs this checkout into it. Cheap when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${HOME:-}" ] || { unset HOME; HOME=~; export HOME; }
cache=${MODELSWAP_CACHE:-$HOME/.cache/modelswap}

python=
for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
  if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$(command -v "$candidate"); break
  fi
done
if [ -z "$python" ]; then
  echo "error: no Python 3.11 or newer was found" >&2
  echo "next: install one (Debian: apt-get install python3 python3-venv) or name it: make env PYTHON=/path/to/python3" >&2
  exit 1
fi

wanted=$(cat requirements/dev.txt pyproject.toml hack/env.sh | sha256sum | cut -d' ' -f1)
if [ -x .venv/bin/python ] && [ "$(cat .venv/.modelswap 2>/dev/null)" = "$wanted" ]; then exit 0; fi

started=$SECONDS
uv=$(command -v uv || true)
if [ -z "$uv" ]; then
  tools=$cache/tools/$(sha256sum requirements/bootstrap.txt | cut -c1-12)
  uv=$tools/bin/uv
  if [ ! -x "$uv" ]; then
    if ! "$python" -m pip --version >/dev/null 2>&1 && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      echo "[env] installing pip and venv for Debian's Python"
      { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-pip python3-venv; } >/dev/null
    fi
    echo "[env] installing uv into $tools"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target "$tools" -r requirements/bootstrap.txt \
      || { echo "error: uv could not be installed with $python -m pip" >&2; echo "next: install pip (Debian: apt-get install python3-pip) or uv itself, then run this again" >&2; exit 1; }
  fi
fi

echo "[env] making .venv with $("$python" -V) (torch and its libraries: about 6 GB the first time, hard links after that)"
[ -x .venv/bin/python ] || "$uv" venv --quiet --python "$python" .venv
export UV_LINK_MODE=${UV_LINK_MODE:-hardlink}
export UV_COMPILE_BYTECODE=1  # torch and transformers take long to compile at each start
"$uv" pip sync --require-hashes --python .venv/bin/python requirements/dev.txt
"$uv" pip install --quiet --no-deps --no-build-isolation --python .venv/bin/python --editable .
echo "$wanted" > .venv/.modelswap
echo "[env] ready after $((SECONDS - started)) s"

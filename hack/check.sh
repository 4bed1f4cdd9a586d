#!/usr/bin/env bash
# check.sh: everything that can be said about the code without running it. Prints each step and its time.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD/engine:$PWD/operator   # this checkout, wherever the environment was made
py=.venv/bin/python failed=()
step() {
  local name=$1 started=$SECONDS; shift
  if output=$("$@" 2>&1); then printf '[check] %-28s ok   %3d s\n' "$name" $((SECONDS - started))
  else printf '[check] %-28s FAILED\n%s\n' "$name" "$output"; failed+=("$name"); fi
}
stdlib_operator() { "$py" -c 'import operator, sys; sys.exit("modelswap" in (operator.__file__ or ""))' && [ ! -e operator/__init__.py ] && [ ! -e engine/__init__.py ]; }
step "ruff" "$py" -m ruff check .
step "ruff format" "$py" -m ruff format --check .
step "mypy strict" "$py" -m mypy
step "layers (import-linter)" .venv/bin/lint-imports --no-cache
step "spelling (codespell)" .venv/bin/codespell
step "charts carry crds/" "$py" hack/gen_chart_crds.py --check
step "chart tables of values" "$py" hack/gen_chart_readme.py --check
step "API page generated" "$py" hack/gen_api_docs.py --check
step "docs generated" "$py" hack/gen_docs.py --check
step "operator stays in stdlib" stdlib_operator
step "no hosts, no local paths" hack/hygiene.sh
if [ ${#failed[@]} -gt 0 ]; then echo "check failed: ${failed[*]}" >&2; exit 1; fi

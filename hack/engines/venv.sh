# shellcheck shell=bash
# venv.sh: sourced by the set-up of one engine (vllm.sh, sglang.sh). Makes it a virtual environment below the cache, once
# for each content of its inputs: another lock file is another folder, so a server that runs from one is never pulled from under.
#
#   engine_begin NAME FILE...   sets $venv, $python and $site; prints $venv and ends the script when it is ready already
#   engine_step TEXT COMMAND... runs a command quietly; says how long it took, or shows the end of what it said
#   engine_packages LOCK        installs exactly what a hashed lock file lists
#   engine_cuda                 what torch's CUDA build links against: stand-ins, or NVIDIA's own with REAL_CUDA=1
#   engine_end MODULE...        imports the modules, so that it is known to work and their byte code is written; prints $venv

[ -n "${HOME:-}" ] || { unset HOME; HOME=~; export HOME; }
engines=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

engine_fail() { echo "error: $1" >&2; echo "next: $2" >&2; exit 1; }

engine_begin() {
  local name=$1 root; shift
  engine=$name
  root=${MODELSWAP_CACHE:-$HOME/.cache/modelswap}/engines
  uv=$engines/../../.venv/bin/uv
  [ -x "$uv" ] || engine_fail "no .venv/bin/uv in this checkout" "make env"
  stamp=$( (cd "$engines" && sha256sum venv.sh cuda_standins.py cuda.txt "$@"
    "$engines/../../.venv/bin/python" -V; echo "${REAL_CUDA:-}") | sha256sum | cut -c1-12)
  venv=$root/$name-$stamp python=$root/$name-$stamp/bin/python
  mkdir -p "$root"
  exec 9>"$venv.lock"
  if ! flock -n 9; then
    echo "[engines] $name: waiting for another set-up of $venv" >&2
    flock -w 900 9 || engine_fail "another set-up holds $venv.lock for more than 900 s" "look for its process: fuser $venv.lock"
  fi
  if [ -e "$venv/.ready" ]; then echo "$venv"; exit 0; fi
  engine_started=$SECONDS
  echo "[engines] $name: making $venv" >&2
  engine_step "virtual environment" "$uv" venv --clear --python "$(readlink -f "$engines/../../.venv/bin/python")" "$venv"
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
}

engine_step() {
  local text=$1 started=$SECONDS log code=0; shift
  log=$(mktemp)
  "$@" >"$log" 2>&1 || code=$?
  if [ $code -ne 0 ]; then tail -25 "$log" >&2; fi
  rm -f "$log"
  [ $code -eq 0 ] || engine_fail "$engine: $text failed (status $code, above) after $((SECONDS - started)) s" "mend the cause and run this again; it starts afresh"
  echo "[engines] $engine: $text ($((SECONDS - started)) s)" >&2
}

engine_packages() {
  engine_step "packages of $1" env UV_LINK_MODE="${UV_LINK_MODE:-hardlink}" "$uv" pip install --no-deps --require-hashes --python "$python" -r "$engines/$1"
}

engine_cuda() {
  if [ -n "${REAL_CUDA:-}" ]; then
    engine_packages cuda.txt
  elif command -v cc >/dev/null && command -v readelf >/dev/null; then
    engine_step "stand-ins for CUDA libraries" "$python" "$engines/cuda_standins.py"
  else
    echo "[engines] $engine: no cc or no readelf here, so NVIDIA's own libraries are installed (2.7 GB more)" >&2
    engine_packages cuda.txt
  fi
}

engine_end() {
  # Without byte code every process of an engine compiles thousands of files at each start.
  engine_step "byte code" env -u PYTHONDONTWRITEBYTECODE "$python" -W ignore -c \
    'import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]' "$@"
  touch "$venv/.ready"
  echo "[engines] $engine: ready after $((SECONDS - engine_started)) s" >&2
  echo "$venv"
}

#!/usr/bin/env bash
# lock.sh: resolves the engines' lock files anew: hashes, no addresses. NAME... limits it to some (default: all).
set -euo pipefail
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- ./*.in
for name in "$@"; do
  name=$(basename "$name" .in)
  overrides=(); [ ! -e "$name.overrides.txt" ] || overrides=(--override "$name.overrides.txt")
  deps=(); case $name in cuda|sglang_wheel) deps=(--no-deps) ;; esac
  ../../.venv/bin/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-header --no-annotate --python-version 3.11 \
    --python-platform x86_64-manylinux_2_36 "${overrides[@]}" "${deps[@]}" "$name.in" -o "$name.txt"
  echo "[lock] $name.txt: $(grep -c '==' "$name.txt") packages"
done

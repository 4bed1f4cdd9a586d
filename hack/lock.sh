#!/usr/bin/env bash
# lock.sh: resolves requirements/*.txt anew: hashes, no addresses.
set -euo pipefail
cd "$(dirname "$0")/.."
lock() { .venv/bin/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-header --python-version 3.11 "$@"; }
lock --universal requirements/bootstrap.in -o requirements/bootstrap.txt
lock --universal --all-extras --override requirements/overrides.txt pyproject.toml -o requirements/dev.txt
for image in operator engine sidecar; do   # the images: one platform, the versions that were tested
  lock --python-platform x86_64-manylinux_2_36 --extra "$image" pyproject.toml -c requirements/dev.txt -o "requirements/$image.txt"
done

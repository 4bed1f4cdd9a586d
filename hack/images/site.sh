#!/usr/bin/env bash
# site.sh [path]: the engine's third-party packages (torch, transformers: about 5 GB) in one folder, keyed by their lock
# file, to be mounted into nodes and pods. Files are hard links into uv's cache. `path` prints the folder and makes nothing.
source "$(dirname "$0")/lib.sh"

lock_file=$requirements/engine.txt
[ -e "$lock_file" ] || die "$lock_file is missing; make it with: make lock"
site=$cache/site/$(key_of "$lock_file")
[ "${1:-}" != path ] || { echo "$site"; exit 0; }

whole() { [ -e "$site.complete" ]; }
whole && exit 0
find_docker
find_uv
lock site
whole && exit 0

# The folder itself must stay the one that running nodes have mounted, so only its content is replaced.
install_site() {
  mkdir -p "$site"
  find "$site" -mindepth 1 -delete
  "$uv" pip install --target "$site" --python-version 3.11 --python-platform "$(platform)" --link-mode hardlink --compile-bytecode --require-hashes -r "$lock_file"
  rm -rf "$site/bin"
  touch "$site.complete"
}
step "engine packages in $(basename "$site")" install_site

#!/usr/bin/env bash
# base.sh [PYTHON]: prints the image that ours are built from, and makes it where none can be pulled: Debian 12 with its
# Python 3.11. PYTHON is another version, for an image that can be pulled.
# MODELSWAP_BASE_IMAGE names another one.
source "$(dirname "$0")/lib.sh"

version=${1:-3.11}
stock=python:$version-slim-bookworm
packages=python3,libgomp1,libnuma1,ca-certificates
own=modelswap/python-base:3.11-$(printf %s "$packages" | sha256sum | cut -c1-8)
find_docker

is_here() { docker image inspect "$1" >/dev/null 2>&1; }

if [ -n "${MODELSWAP_BASE_IMAGE:-}" ]; then
  echo "$MODELSWAP_BASE_IMAGE"
elif is_here "$stock" || { { [ "$version" != 3.11 ] || ! is_here "$own"; } && can_pull "$stock"; }; then
  echo "$stock"
else
  [ "$version" = 3.11 ] ||
    die "$stock cannot be pulled, and only an image with Python 3.11 can be made here; make the environment with that one: make env PYTHON=python3.11"
  if ! is_here "$own"; then
    require_root_on_debian "building a base image" >&2
    require_debian_12 "building a base image" >&2
    need_packages mmdebstrap >&2
    lock base-image
    archive=$kind_cache/node/${own//[\/:]/-}.tar
    mkdir -p "$kind_cache/node"
    bootstrap() {
      local sources=/etc/apt/sources.list.d/debian.sources unfinished=$kind_cache/node/unfinished.${archive##*/}
      [ -e "$sources" ] || sources=/etc/apt/sources.list
      mmdebstrap -q --variant=minbase --include="$packages" bookworm "$unfinished" "$sources"
      mv "$unfinished" "$archive"
    }
    [ -s "$archive" ] || step "Debian with Python 3.11" bootstrap >&2
    step "import $own" docker import -c 'ENV PATH=/usr/local/bin:/usr/bin:/bin' -c 'CMD ["python3"]' "$archive" "$own" >&2
  fi
  echo "$own"
fi

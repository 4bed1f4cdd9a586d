#!/usr/bin/env bash
# choose-image.sh: prints the node image to use, and makes sure that it is there: MODELSWAP_NODE_IMAGE if set, the one
# built from this folder if it exists, kind's stock image where it can be pulled, and else the one of this folder, built now.
source "$(dirname "$0")/lib.sh"

DOCKER_HOST=$("$hack_kind/dockerd.sh" host) || die "no Docker engine answers; run $hack_kind/dockerd.sh start"
export DOCKER_HOST
own=$("$hack_kind/node-image.sh" name)
is_here() { docker image inspect "$1" >/dev/null 2>&1; }

if [ -n "${MODELSWAP_NODE_IMAGE:-}" ]; then
  echo "$MODELSWAP_NODE_IMAGE"
elif is_here "$own"; then
  echo "$own"
elif is_here "$STOCK_NODE_IMAGE" || can_pull "$STOCK_NODE_IMAGE"; then
  echo "$STOCK_NODE_IMAGE"
else
  "$hack_kind/node-image.sh" build >&2
  echo "$own"
fi

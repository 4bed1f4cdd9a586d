#!/usr/bin/env bash
# build.sh: Prometheus' promtool, built from its Go module into $MODELSWAP_CACHE/kind/bin; prints nothing when it is there.
#
# Without service discovery, whose clients of every cloud are most of it and nothing to rules. What it is made of is pinned
# by the files of this folder, and those are its key.
source "$(dirname "$0")/../kind/lib.sh"

module=$(cd "$(dirname "$0")" && pwd)
key=$(cat "$module"/*.* | sha256sum | cut -c1-12)

build() {
  cd "$module"
  CGO_ENABLED=0 nice -n 10 go build -p 2 -tags remove_all_sd -trimpath -buildvcs=false -ldflags '-s -w' \
    -o "$bin/promtool.new" github.com/prometheus/prometheus/cmd/promtool
  mv "$bin/promtool.new" "$bin/promtool"
  mark_built "$bin/promtool" "$key"
}

built "$bin/promtool" "$key" && exit
use_go
lock promtool
built "$bin/promtool" "$key" || step "build promtool" build

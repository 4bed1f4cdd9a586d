#!/usr/bin/env bash
# build.sh: cert-manager's controllers, built from its Go module into $MODELSWAP_CACHE/certmanager, its definitions beside them.
#
# What they are made of is pinned by the files of this folder, and those are its key: a change to any builds them again.
# To raise the version: go get github.com/cert-manager/cert-manager@VERSION and go mod tidy here.
source "$(dirname "$0")/../kind/lib.sh"

module=$(cd "$(dirname "$0")" && pwd)
into=$(dirname "$kind_cache")/certmanager
key=$(cat "$module"/*.* | sha256sum | cut -c1-12)
mkdir -p "$into"

build() {
  local source file
  cd "$module"
  CGO_ENABLED=0 nice -n 19 go build -p 2 -trimpath -buildvcs=false -ldflags '-s -w' -o "$into/controllers.new" .
  source=$(go list -m -f '{{.Dir}}' github.com/cert-manager/cert-manager)
  for file in "$source"/deploy/crds/cert-manager.io_*.yaml; do echo ---; cat "$file"; done >"$into/crds.yaml"
  mv "$into/controllers.new" "$into/controllers"
  mark_built "$into/controllers" "$key"
}

built "$into/controllers" "$key" && exit
use_go
lock certmanager   # after Go's own lock: a second lock gives up the first
built "$into/controllers" "$key" || step "build cert-manager's controllers" build

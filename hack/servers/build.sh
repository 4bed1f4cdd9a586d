#!/usr/bin/env bash
# build.sh [SERVER...]: the servers that tests read versions from: versitygw (S3) and registry (OCI), built from Go modules
# into $MODELSWAP_CACHE/servers/bin, and nginx (https), from the machine's packages where it is missing.
#
# What a program is made of is pinned by the files of its folder, and those are its key: a change to any builds it again.
source "$(dirname "$0")/../kind/lib.sh"

modules=$(cd "$(dirname "$0")" && pwd)
servers=$(dirname "$kind_cache")/servers/bin
wanted=("${@:-versitygw registry nginx}")
mkdir -p "$servers"

package_of() {
  case $1 in
  versitygw) echo github.com/versity/versitygw/cmd/versitygw ;;
  registry) echo . ;;   # our own main, without the clients of every cloud's storage
  *) die "no server is called $1; there are versitygw, registry, nginx" ;;
  esac
}

key_of() { cat "$modules/$1"/*.* | sha256sum | cut -c1-12; } # SERVER

build() { # SERVER
  cd "$modules/$1"
  CGO_ENABLED=0 nice -n 10 go build -p 2 -trimpath -buildvcs=false -ldflags '-s -w' -o "$servers/$1.new" "$(package_of "$1")"
  mv "$servers/$1.new" "$servers/$1"
  mark_built "$servers/$1" "$(key_of "$1")"
}

for server in ${wanted[*]}; do
  if [ "$server" = nginx ]; then
    PATH=$PATH:/usr/sbin command -v nginx >/dev/null || need_packages nginx-light
    continue
  fi
  package_of "$server" >/dev/null
  built "$servers/$server" "$(key_of "$server")" && continue
  use_go
  lock servers   # after Go's own lock: a second lock gives up the first
  built "$servers/$server" "$(key_of "$server")" || step "build $server" build "$server"
done

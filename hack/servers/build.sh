#!/usr/bin/env bash
# build.sh [SERVER...]: the servers that tests read versions from, in $MODELSWAP_CACHE/servers/bin: versitygw (S3),
# fake-gcs-server (Google) and registry (OCI), built from Go modules; azurite (Azure), from npm's packages; and nginx
# (https), from the machine's packages where it is missing.
#
# What a program is made of is pinned by the files of its folder, and those are its key: a change to any builds it again.
source "$(dirname "$0")/../kind/lib.sh"

modules=$(cd "$(dirname "$0")" && pwd)
servers=$(dirname "$kind_cache")/servers/bin
wanted=("${@:-versitygw fake-gcs-server azurite registry nginx}")
mkdir -p "$servers"

package_of() {
  case $1 in
  versitygw) echo github.com/versity/versitygw/cmd/versitygw ;;
  registry | fake-gcs-server) echo . ;;   # mains of our own, which say why
  azurite) ;;
  *) die "no server is called $1; there are versitygw, fake-gcs-server, azurite, registry, nginx" ;;
  esac
}

key_of() { cat "$modules/$1"/*.* | sha256sum | cut -c1-12; } # SERVER

build() { # SERVER
  if [ "$1" = azurite ]; then
    install_azurite
  else
    build_go "$1"
  fi
  mark_built "$servers/$1" "$(key_of "$1")"
}

build_go() { # SERVER
  cd "$modules/$1"
  CGO_ENABLED=0 nice -n 10 go build -p 2 -trimpath -buildvcs=false -ldflags '-s -w' -o "$servers/$1.new" "$(package_of "$1")"
  mv "$servers/$1.new" "$servers/$1"
}

install_azurite() { # no script of any package is run
  local home=$(dirname "$servers")/azurite
  rm -rf "$home"
  mkdir -p "$home"
  cp "$modules"/azurite/package*.json "$home"
  nice -n 10 npm ci --prefix "$home" --ignore-scripts --no-audit --no-fund --no-update-notifier
  printf '#!/bin/sh\nexec node "%s" "$@"\n' "$home/node_modules/azurite/dist/src/blob/main.js" >"$servers/azurite"
  chmod +x "$servers/azurite"
}

for server in ${wanted[*]}; do
  if [ "$server" = nginx ]; then
    PATH=$PATH:/usr/sbin command -v nginx >/dev/null || need_packages nginx-light
    continue
  fi
  package_of "$server" >/dev/null
  built "$servers/$server" "$(key_of "$server")" && continue
  if [ "$server" = azurite ]; then
    command -v node >/dev/null && command -v npm >/dev/null || need_packages nodejs npm
  else
    use_go
  fi
  lock servers   # after Go's own lock: a second lock gives up the first
  built "$servers/$server" "$(key_of "$server")" || step "build $server" build "$server"
done

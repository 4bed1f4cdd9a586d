#!/usr/bin/env bash
# build.sh [PROGRAM...]: Flux's and Argo CD's controllers, built from Go modules into $MODELSWAP_CACHE/gitops/bin, their
# CRDs beside them in gitops/crds.
#
# One module per program: a shared one would raise the versions that each was released with. What a program is made of is
# pinned by the files of its folder, and those are its key: a change to any builds it again.
source "$(dirname "$0")/../kind/lib.sh"

modules=$(cd "$(dirname "$0")" && pwd)
gitops=$(dirname "$kind_cache")/gitops
all=(source-controller kustomize-controller flux-verdict argocd)
wanted=("${@:-${all[@]}}")
mkdir -p "$gitops/bin" "$gitops/crds"

package_of() {
  case $1 in
  source-controller | kustomize-controller) echo "github.com/fluxcd/$1" ;;
  flux-verdict) echo . ;;   # our own question to Flux's libraries
  argocd) echo github.com/argoproj/argo-cd/v3/cmd ;;   # every program of Argo CD in one: which it is, its name at the start says
  *) die "no program is called $1; there are ${all[*]}" ;;
  esac
}

crds_of() { # PACKAGE: the definitions in its module, as one stream
  local source file
  [ "$1" != . ] || return 0
  source=$(go list -m -f '{{.Dir}}' "${1%/cmd}")
  for file in "$source"/config/crd/bases/*.yaml "$source"/manifests/crds/app*-crd.yaml; do
    [ ! -e "$file" ] || { echo ---; cat "$file"; }
  done
}

key_of() { cat "$modules/$1"/*.* | sha256sum | cut -c1-12; } # PROGRAM

build() { # PROGRAM
  local package
  package=$(package_of "$1")
  cd "$modules/$1"
  # Two compilations at a time: each may take 1 GB, and whoever waits for this has other things running.
  CGO_ENABLED=0 nice -n 10 go build -p 2 -trimpath -buildvcs=false -ldflags '-s -w' -o "$gitops/bin/$1.new" "$package"
  crds_of "$package" >"$gitops/crds/$1.yaml"
  mv "$gitops/bin/$1.new" "$gitops/bin/$1"
  mark_built "$gitops/bin/$1" "$(key_of "$1")"
}

for program in "${wanted[@]}"; do
  package_of "$program" >/dev/null
  # Argo CD's cache, without which it does not start.
  [ "$program" != argocd ] || command -v redis-server >/dev/null || need_packages redis-server
  built "$gitops/bin/$program" "$(key_of "$program")" && continue
  use_go
  lock gitops   # after Go's own lock: a second lock gives up the first
  built "$gitops/bin/$program" "$(key_of "$program")" || step "build $program" build "$program"
done

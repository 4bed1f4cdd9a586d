#!/usr/bin/env bash
# kube-binaries.sh [COMMAND...]: Kubernetes' own commands and etcd, built from Go modules into $MODELSWAP_CACHE/kind/kube/bin.
#
# k8s.io/kubernetes replaces its staging modules by folders, which `go install` refuses for a dependency. A module of our
# own repeats those replacements with the versions that were published, and builds the commands from there.
source "$(dirname "$0")/lib.sh"

version=$KUBERNETES_VERSION
all=(etcd kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl kubeadm)
wanted=("${@:-${all[@]}}")

missing() { local c; for c in "${wanted[@]}"; do built "$kube_bin/$c" "$version" || echo "$c"; done; }
[ -n "$(missing)" ] || exit 0
use_go
lock kube-binaries   # after Go's own lock: a second lock gives up the first
mapfile -t todo < <(missing)
cd "$kind_cache/kube"
export GOFLAGS=-mod=mod CGO_ENABLED=0

write_module() {
  printf 'module modelswap.dev/localcluster\n\ngo 1.25\n' >go.mod
  local source m
  source=$(go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
  {
    printf 'module modelswap.dev/localcluster\n\n%s\n\nrequire k8s.io/kubernetes %s\n\n' "$(grep -m1 '^go ' "$source/go.mod")" "$version"
    sed -n 's#^\s*\(k8s.io/[a-z0-9-]*\) => ./staging/src/.*#\1#p' "$source/go.mod" | sort -u |
      while read -r m; do printf 'replace %s => %s v0.%s\n' "$m" "$m" "${version#v1.}"; done
  } >go.mod.new
  mv go.mod.new go.mod
  # Each command by its own path: one argument for the whole module is in conflict with them.
  go get $(printf "k8s.io/kubernetes/cmd/%s@$version " kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl kubeadm)
  mark_built go.mod "$version"
}

minor=${version#v1.}
minor=${minor%%.*}
# Without these a server calls itself v0.0.0, and Helm's kubeVersion check refuses it.
stamps="-X k8s.io/component-base/version.gitVersion=$version -X k8s.io/component-base/version.gitMajor=1"
stamps="$stamps -X k8s.io/component-base/version.gitMinor=$minor -X k8s.io/client-go/pkg/version.gitVersion=$version"

build() { # COMMAND
  local package=k8s.io/kubernetes/cmd/$1
  [ "$1" != etcd ] || package=go.etcd.io/etcd/server/v3   # the version that this Kubernetes itself requires
  go build -trimpath -ldflags "-s -w $stamps" -o "$kube_bin/$1.new" "$package"
  mv "$kube_bin/$1.new" "$kube_bin/$1"
  mark_built "$kube_bin/$1" "$version"
}

built go.mod "$version" || step "module of Kubernetes $version" write_module
for c in "${todo[@]}"; do step "build $c $version" build "$c"; done

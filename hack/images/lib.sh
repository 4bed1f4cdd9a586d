# Shared by the scripts of this folder: the engine that builds, the base image, and how packages get into a context.
# Sourced, never run.
source "$(dirname "${BASH_SOURCE[0]}")/../kind/lib.sh"

repository=$(cd "$hack_kind/../.." && pwd)
cache=$(dirname "$kind_cache")
requirements=$repository/requirements

find_docker() { # sets DOCKER_HOST, and the old builder where the client has no other
  DOCKER_HOST=$("$hack_kind/dockerd.sh" host) || die "no Docker engine answers; start one with: make cluster-up"
  export DOCKER_HOST
  docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0
}

platform() { # the wheels that fit the engine's machine, which is not always this one
  case $(docker version --format '{{.Server.Arch}}') in
  amd64) echo x86_64-manylinux_2_28 ;;
  arm64) echo aarch64-manylinux_2_28 ;;
  *) die "no wheels are known for Docker's architecture $(docker version --format '{{.Server.Arch}}')" ;;
  esac
}

key_of() { sha256sum "$1" | cut -c1-12; } # FILE

# install_locked FOLDER REQUIREMENTS OPTION...: third-party wheels, by their hashes
install_locked() {
  local to=$1 from=$2
  shift 2
  rm -rf "$to"
  "$uv" pip install --quiet --target "$to" --python-version 3.11 --only-binary :all: --require-hashes -r "$from" "$@"
  rm -rf "$to/bin"
}

#!/usr/bin/env bash
# build.sh operator|engine|engine-full|sidecar|upstream|object-store [TAG]: builds an image. Everything from a package registry is installed into the
# build context first, by hash; the build itself needs no network.
source "$(dirname "$0")/lib.sh"

name=${1:-}
case $name in
operator) file=operator target= locked=$requirements/operator.txt ;;
engine) file=engine target=engine locked= ;;              # torch and transformers are mounted at run time
engine-full) file=engine target=engine-full locked=$requirements/engine.txt ;;
sidecar) file=engine target=sidecar locked=$requirements/sidecar.txt ;;
upstream) file=upstream target= locked= ;;                # what a real engine's server runs in; the engine itself is mounted
object-store) file=object-store target= locked= ;;        # an S3 server, for the demo and tests
*) die "usage: build.sh operator|engine|engine-full|sidecar|upstream|object-store [TAG]" ;;
esac
tag=${2:-modelswap/$name:dev}
[ -z "$locked" ] || [ -e "$locked" ] || die "$locked is missing; make it with: make lock"

find_docker
find_uv
python=3.11
# An engine's environment is made with the Python of .venv, and its packages fit no other one.
[ "$name" != upstream ] || python=$("$repository/.venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
base=$("$repository/hack/images/base.sh" "$python")
lock "image-$name"
context=$cache/images/$name
mkdir -p "$context"

# The image of a foreign engine has nothing of ours in it, so a change of ours leaves it alone.
sources=(operator engine pyproject.toml LICENSE README.md)
[ "$name" != upstream ] || sources=(hack/engines/serve_vllm.py hack/engines/serve_sglang.py)
[ "$name" != object-store ] || sources=(hack/servers/versitygw)

content() { # one hash over all that decides what the image holds; written into it as a label
  {
    docker image inspect --format '{{.Id}}' "$base" 2>/dev/null || echo "$base"
    cd "$repository"
    find "${sources[@]}" docker hack/images ${locked:+"$locked"} \
      -type f -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  } | sha256sum | cut -c1-32
}

third_party() {
  if [ "$name" = engine-full ]; then
    rm -rf "$context/site"
    cp -al "$("$repository/hack/images/site.sh" path)" "$context/site"
  else
    install_locked "$context/site" "$locked" --python-platform "$(platform)"
  fi
  mark_built "$context/site" "$(key_of "$locked")"
}

own_package() {
  local wheels=$context/wheels
  rm -rf "$wheels" "$context/app"
  "$uv" build --quiet --wheel --out-dir "$wheels" "$repository"
  "$uv" pip install --quiet --target "$context/app" --python-version 3.11 --no-deps --no-index "$wheels"/*.whl
  rm -rf "$wheels" "$context/app/bin"
  cp "$repository/docker/modelswap" "$context/modelswap"
}

image() {
  local previous
  previous=$(docker image inspect --format '{{.Id}}' "$tag" 2>/dev/null || true)
  docker build --quiet --file "$repository/docker/$file.Dockerfile" --build-arg "BASE=$base" ${target:+--target "$target"} \
    --label "dev.modelswap.content=$key" --tag "$tag" "$context"
  # What had the tag before is of no more use; where a container or a layer still needs it, it stays.
  [ -z "$previous" ] || [ "$previous" = "$(docker image inspect --format '{{.Id}}' "$tag")" ] || docker image rm "$previous" || true
}

key=$(content)
there=$(docker image inspect --format '{{index .Config.Labels "dev.modelswap.content"}}' "$tag" 2>/dev/null || true)
[ "$there" != "$key" ] || exit 0

[ "$name" != engine-full ] || "$repository/hack/images/site.sh"
if [ -n "$locked" ]; then
  built "$context/site" "$(key_of "$locked")" || step "packages of the $name image" third_party
fi
if [ "$name" = upstream ]; then
  cp "$repository/docker/vllm" "$repository"/hack/engines/serve_{vllm,sglang}.py "$context/"
elif [ "$name" = object-store ]; then
  "$repository/hack/servers/build.sh" versitygw
  cp "$cache/servers/bin/versitygw" "$context/"
else
  step "wheel of modelswap" own_package
fi
step "image $tag" image

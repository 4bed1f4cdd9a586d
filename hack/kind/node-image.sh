#!/usr/bin/env bash
# node-image.sh [name|build]: the image of kind's nodes, built where none can be pulled: from Debian packages, Go modules and
# the files that kind's own module ships. `name` prints its name; `build` (the default) makes it unless it is there.
source "$(dirname "$0")/lib.sh"

inputs=(coredns.go node-image.sh oci_archive.py podnet.sh default-cni.yaml pause.c)
recipe=$({ echo "$KIND_VERSION $CRICTL_VERSION $COREDNS_VERSION"; cd "$hack_kind" && cat "${inputs[@]}"; } | sha256sum | cut -c1-8)
image=modelswap/kind-node:$KUBERNETES_VERSION-$recipe
[ "${1:-build}" != name ] || { echo "$image"; exit 0; }

DOCKER_HOST=$("$hack_kind/dockerd.sh" host) || die "no Docker engine answers; run $hack_kind/dockerd.sh start"
export DOCKER_HOST
image_is_there() { docker image inspect "$image" >/dev/null 2>&1; }
image_is_there && exit 0

require_root_on_debian "building a node image"
require_debian_12 "building a node image"
need_packages mmdebstrap jq busybox-static gcc libc6-dev iptables systemd ca-certificates
"$hack_kind/kube-binaries.sh"
"$hack_kind/tools.sh" kind crictl coredns
use_go
lock node-image
image_is_there && exit 0

work=$kind_cache/node
mkdir -p "$work"
cd "$work"
root=$work/root images=$work/images container=modelswap-node-build
library=usr/lib/x86_64-linux-gnu
packages=systemd,conntrack,iptables,nftables,iproute2,ethtool,util-linux,mount,kmod,libseccomp2,pigz,e2fsprogs,bash
packages=$packages,ca-certificates,curl,jq,procps,socat,containerd,runc,containernetworking-plugins

# Debian 12, whose systemd still boots on cgroup v1, from the machine's own package sources.
debian_root() {
  if [ ! -s root.tar ]; then
    local sources=/etc/apt/sources.list.d/debian.sources
    [ -e "$sources" ] || sources=/etc/apt/sources.list
    mmdebstrap -q --variant=minbase --include="$packages" bookworm unfinished.root.tar "$sources"
    mv unfinished.root.tar root.tar
  fi
  rm -rf "$root"
  mkdir "$root"
  tar -C "$root" -xf root.tar
}

# kube-proxy and the pod network share a small file system: busybox, the iptables of the node, the libraries they load.
network_root() { # DIR
  local to=$1 tool file
  mkdir -p "$to"/{usr/local/bin,usr/sbin,$library,bin,etc/cni/net.d,run,tmp,lib64}
  cp /bin/busybox "$to/bin/"
  for tool in sh ls cat ip sleep echo mv mkdir grep cut; do ln -s busybox "$to/bin/$tool"; done
  cp -a "$root"/usr/sbin/{xtables-nft-multi,xtables-legacy-multi,nft,conntrack} "$to/usr/sbin/"
  cp -a "$root/$library/xtables" "$to/$library/"
  for tool in iptables ip6tables; do
    for file in "$tool" "$tool-save" "$tool-restore"; do ln -s xtables-nft-multi "$to/usr/sbin/$file"; done
  done
  # The modules need libm as well: without it, Services with two endpoints would get no rules.
  for file in "$to"/usr/sbin/{xtables-nft-multi,xtables-legacy-multi,nft,conntrack} "$root/$library"/xtables/*.so; do
    LD_LIBRARY_PATH=$root/$library /lib64/ld-linux-x86-64.so.2 --list "$file" || true
  done | grep -oE 'lib[^ /]+\.so[^ ]*' | sort -u | while read -r file; do cp -L "$root/$library/$file" "$to/$library/"; done
  ln -s usr/lib "$to/lib"
  cp -L "$root/$library/ld-linux-x86-64.so.2" "$to/lib64/"
  chroot "$to" /usr/sbin/iptables -m statistic --help | grep -q every
}

python=$hack_kind/../../.venv/bin/python
[ -x "$python" ] || python=python3
pack() { "$python" "$hack_kind/oci_archive.py" "$1" "$2" "$images/$3" "$images/$3.tar"; } # NAME ENTRYPOINT FOLDER
required() { "$kube_bin/kubeadm" config images list --kubernetes-version "$KUBERNETES_VERSION" 2>/dev/null | grep "/$1:"; }

component_images() {
  local c
  rm -rf "$images"
  for c in kube-apiserver kube-controller-manager kube-scheduler etcd; do
    mkdir -p "$images/$c/usr/local/bin"
    cp "$kube_bin/$c" "$images/$c/usr/local/bin/"
  done
  mkdir -p "$images"/{pause,coredns/etc/ssl/certs}
  cp "$bin/coredns" "$images/coredns/"
  cp /etc/ssl/certs/ca-certificates.crt "$images/coredns/etc/ssl/certs/"
  gcc -Os -static -s -o "$images/pause/pause" "$hack_kind/pause.c"
  network_root "$images/kube-proxy"
  cp -a "$images/kube-proxy" "$images/podnet"
  cp "$kube_bin/kube-proxy" "$images/kube-proxy/usr/local/bin/"
  cp "$kube_bin/kubectl" "$images/podnet/usr/local/bin/"
  install -m 755 "$hack_kind/podnet.sh" "$images/podnet/podnet.sh"
  for c in kube-apiserver kube-controller-manager kube-scheduler kube-proxy; do
    pack "registry.k8s.io/$c:$KUBERNETES_VERSION" "/usr/local/bin/$c" "$c"
  done
  pack "$(required etcd)" /usr/local/bin/etcd etcd
  pack "$(required coredns)" /coredns coredns
  pack registry.k8s.io/pause:3.10 /pause pause
  pack docker.io/modelswap/podnet:1 /podnet.sh podnet
}

# What kind's base image and `kind build node-image` do to a root file system.
node_root() {
  local files units binary
  files=$(cd "$work" && GOFLAGS=-mod=mod go mod download -json "sigs.k8s.io/kind@$KIND_VERSION" | jq -r .Dir)/images/base/files
  mkdir -p "$root/kind/bin" "$root/kind/manifests" "$root/etc/kubernetes/manifests" "$root/opt/cni/bin"
  cp -r --no-preserve=mode,ownership "$files/etc/." "$root/etc/"
  cp -r --no-preserve=mode,ownership "$files/kind/." "$root/kind/"
  cp --no-preserve=mode "$files"/usr/local/bin/* "$root/usr/local/bin/"
  chmod 755 "$root"/usr/local/bin/* "$root/kind" "$root/kind/bin" "$root"/kind/bin/*
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}
  units=$root/lib/systemd/system
  rm -f "$units"/sysinit.target.wants/systemd-tmpfiles-setup.service "$units"/multi-user.target.wants/* \
    "$root"/etc/systemd/system/*.wants/* "$units"/local-fs.target.wants/* "$units"/basic.target.wants/* \
    "$units"/sockets.target.wants/{*udev*,*initctl*,dbus*} "$units/containerd.service"
  echo ReadKMsg=no >>"$root/etc/systemd/journald.conf"
  ln -sf /usr/lib/systemd/systemd "$root/usr/sbin/init"
  systemctl -q --root="$root" enable kubelet.service containerd.service undo-mount-hacks.service
  systemctl -q --root="$root" mask systemd-binfmt.service dbus.service dbus.socket
  for binary in containerd ctr containerd-shim-runc-v2; do ln -sf "/usr/bin/$binary" "$root/usr/local/bin/$binary"; done
  cp "$root"/usr/lib/cni/{host-local,loopback,ptp,portmap} "$root/opt/cni/bin/"
  rm -rf "$root/usr/lib/cni"
  cp "$bin/crictl" "$root/usr/local/bin/"
  cp "$kube_bin"/{kubelet,kubectl,kubeadm} "$root/usr/bin/"
  printf '%s' "$KUBERNETES_VERSION" >"$root/kind/version"
  sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' "$root/etc/containerd/config.toml"
  chroot "$root" /usr/bin/ctr oci spec |
    jq '.hooks.createContainer[.hooks.createContainer|length] |= . + {"path":"/kind/bin/mount-product-files.sh"} | del(.process.rlimits)' \
      >"$root/etc/containerd/cri-base.json"
  cp "$hack_kind/default-cni.yaml" "$root/kind/manifests/"
}

base_image() { # `docker import` cannot set the stop signal; a build on top of it can
  tar -C "$root" -c . | docker import -c 'ENV container=docker' \
    -c 'ENTRYPOINT [ "/usr/local/bin/entrypoint", "/sbin/init" ]' - modelswap/kind-base:import
  printf 'FROM modelswap/kind-base:import\nSTOPSIGNAL SIGRTMIN+3\n' | DOCKER_BUILDKIT=0 docker build -q -t modelswap/kind-base:latest -
}

preload() { # the component images, into the node's own containerd
  local archive
  docker rm -f "$container" >/dev/null 2>&1 || true
  docker run -d --name "$container" --entrypoint sleep --security-opt seccomp=unconfined modelswap/kind-base:latest infinity
  docker exec -d "$container" bash -c 'containerd >/dev/null 2>&1'
  docker exec "$container" bash -c 'for i in $(seq 100); do ctr version >/dev/null 2>&1 && exit 0; sleep .1; done; exit 1'
  for archive in "$images"/*.tar; do
    docker exec -i "$container" ctr -n k8s.io images import --all-platforms --no-unpack --digests - <"$archive"
  done
  docker exec "$container" bash -c 'kill "$(pgrep -x containerd)"; while pgrep -x containerd >/dev/null; do sleep .1; done'
  docker commit --change 'ENTRYPOINT [ "/usr/local/bin/entrypoint", "/sbin/init" ]' "$container" "$image"
  docker rm -f "$container"
}

step "Debian root file system" debian_root
step "component images" component_images
step "node root file system" node_root
step "node base image" base_image
step "node image $image" preload
rm -rf "$root" "$images"

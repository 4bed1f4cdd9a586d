#!/usr/bin/env bash
# dockerd.sh start|stop|host: a Docker engine without systemd, for machines where none answers.
# `host` prints the DOCKER_HOST to use; `stop` ends only an engine that `start` began, and takes its bridges, rules and mounts along.
# An engine that was killed is cleaned up after by either.
source "$(dirname "$0")/lib.sh"

home=$kind_cache/docker
socket=$home/docker.sock
pidfile=$home/dockerd.pid
pools=(172.29.0.0/24 172.30.0.0/16)

answers() { DOCKER_HOST=$1 timeout 10 docker version >/dev/null 2>&1; }
was_killed() { [ -e "$home/before" ] && ! ours_runs; }
ours_runs() { [ -f "$pidfile" ] && grep -qaF "unix://$socket" "/proc/$(cat "$pidfile")/cmdline" 2>/dev/null; }

host() {
  ours_runs && { echo "unix://$socket"; return; }
  local asked=${DOCKER_HOST:-$(docker context inspect --format '{{.Endpoints.docker.Host}}' 2>/dev/null || echo unix:///var/run/docker.sock)}
  answers "$asked" && { echo "$asked"; return; }
  return 1
}

# Docker asks for every capability in privileged containers. Where the machine itself lacks one, runc refuses the
# container, so the runtime is wrapped to ask for one less. Printed: the dockerd options that are needed for it.
runtime_options() {
  local bounding
  bounding=$((16#$(sed -n 's/^CapBnd:\s*//p' /proc/self/status)))
  (((bounding >> 24 & 1) == 0)) || return 0   # 24 = CAP_SYS_RESOURCE
  cat >"$home/runc-bounded" <<'RUNC'
#!/bin/bash
# runc, asked for one capability less (CAP_SYS_RESOURCE, which this machine does not have).
previous=
for argument in "$@"; do
  case $previous in
  --bundle | -b) spec=$argument/config.json ;;
  --process | -p) spec=$argument ;;
  *) spec= ;;
  esac
  [ -z "$spec" ] || [ ! -f "$spec" ] || sed -i 's/"CAP_SYS_RESOURCE",//g; s/,"CAP_SYS_RESOURCE"//g' "$spec"
  previous=$argument
done
exec /usr/sbin/runc "$@"
RUNC
  chmod +x "$home/runc-bounded"
  echo "--add-runtime bounded=$home/runc-bounded --default-runtime bounded"
}

launch() {
  local forward
  forward=$(iptables -S FORWARD 2>/dev/null | sed -n 's/^-P FORWARD //p')
  printf 'forward_policy=%s\nip_forward=%s\n' "${forward:-ACCEPT}" "$(cat /proc/sys/net/ipv4/ip_forward)" >"$home/before"
  # shellcheck disable=SC2046
  nohup setsid dockerd --data-root "$home/data" --exec-root "$home/exec" --pidfile "$pidfile" -H "unix://$socket" \
    $(runtime_options) --storage-driver overlay2 --exec-opt native.cgroupdriver=cgroupfs --default-cgroupns-mode private \
    --userland-proxy-path "$(command -v docker-proxy || echo /usr/sbin/docker-proxy)" \
    --bip "${pools[0]/.0\//.1/}" --default-address-pool "base=${pools[1]},size=24" >"$logs/dockerd.log" 2>&1 9>&- &
  local pid=$!
  for _ in $(seq 300); do
    answers "unix://$socket" && return 0
    kill -0 "$pid" 2>/dev/null || break
    sleep .2
  done
  kill "$pid" 2>/dev/null || true
  tail -n 8 "$logs/dockerd.log" >&2
  return 1
}

start() {
  mkdir -p "$home"
  lock docker   # before the first look: an engine that is just being started does not answer yet
  host >/dev/null && return 0
  [ "$(uname)" = Linux ] || die "no Docker engine answers: start Docker Desktop (or set DOCKER_HOST) and run this again"
  require_root_on_debian "starting a Docker engine"
  local longest=$home/exec/containerd/containerd-debug.sock
  [ ${#longest} -lt 108 ] || die "the path $longest is too long for a socket: set MODELSWAP_CACHE to a shorter folder"
  command -v dockerd >/dev/null && command -v docker >/dev/null || need_packages docker.io
  need_packages iptables iproute2 ca-certificates
  ! was_killed || step "remove what a killed Docker engine left" clean_up
  step "start a Docker engine" launch
}

delete_rules() { # TABLE: what this engine added, and nothing else
  local table=$1 rule
  iptables -t "$table" -S | { grep -E -- '-[jgi] DOCKER|-[ioj] (docker0|br-[0-9a-f]{12})( |$)|-[sd] 172\.(29\.0|30\.[0-9]+)\.[0-9]+/(24|32)( |$)' || true; } |
    sed -n 's/^-A /-D /p' | while read -r rule; do eval "iptables -t $table $rule"; done
  iptables -t "$table" -S | sed -n 's/^-N \(DOCKER[A-Z0-9-]*\)$/\1/p' | while read -r rule; do iptables -t "$table" -F "$rule"; done
  iptables -t "$table" -S | sed -n 's/^-N \(DOCKER[A-Z0-9-]*\)$/\1/p' | while read -r rule; do iptables -t "$table" -X "$rule"; done
}

# What outlives a killed dockerd: its containerd, the shims, and everything in containers, known by their cgroups.
orphans() {
  local file pid
  {
    grep -laF "$home/exec/containerd/" /proc/[0-9]*/cmdline
    find "$home/data/containers" -mindepth 1 -maxdepth 1 -printf '%f\n' | grep -xE '[0-9a-f]{64}' | grep -lF -f - /proc/[0-9]*/cgroup
  } 2>/dev/null | sort -u | while read -r file; do
    pid=${file//[^0-9]/}
    [ "${file##*/}" = cgroup ] || [[ $(cat "/proc/$pid/comm" 2>/dev/null) == containerd* ]] || continue
    grep -q '^State:\s*[A-Y]' "/proc/$pid/status" 2>/dev/null && echo "$pid"   # Z has ended, and waits for its parent
  done
}

end_orphans() {
  local pids
  for _ in $(seq 100); do
    mapfile -t pids < <(orphans || true)
    [ ${#pids[@]} -gt 0 ] || return 0
    echo "ending ${pids[*]}"
    kill -KILL "${pids[@]}" 2>/dev/null || true
    sleep .1
  done
  die "processes of a killed Docker engine do not end: ${pids[*]}"
}

clean_up() {
  local name before_policy before_forward
  end_orphans
  for name in $(ip -o link show type bridge | sed -nE 's/^[0-9]+: (docker0|br-[0-9a-f]{12}):.*/\1/p'); do
    ip -o -4 address show dev "$name" | grep -qE ' inet 172\.(29\.0|30\.[0-9]+)\.' && ip link delete "$name"
  done
  delete_rules filter
  delete_rules nat
  before_policy=$(sed -n 's/^forward_policy=//p' "$home/before")
  before_forward=$(sed -n 's/^ip_forward=//p' "$home/before")
  iptables -P FORWARD "${before_policy:-ACCEPT}"
  echo "${before_forward:-1}" >/proc/sys/net/ipv4/ip_forward
  awk -v home="$home/" 'index($2, home) == 1 {print $2}' /proc/mounts | sort -r |
    while read -r name; do umount "$name" || umount --lazy "$name"; done
  # As after a boot, where the pid files and sockets of the last engine are gone as well.
  rm -rf --one-file-system "$home/exec"
  rm -f "$pidfile" "$socket" "$home/before"
}

stop_engine() {
  local pid
  pid=$(cat "$pidfile")
  kill "$pid"
  for _ in $(seq 300); do kill -0 "$pid" 2>/dev/null || break; sleep .1; done
  ! kill -0 "$pid" 2>/dev/null || die "dockerd (process $pid) did not end in 30 s; see $logs/dockerd.log"
  clean_up
}

stop() {
  [ -e "$home/before" ] || return 0
  lock docker
  if ours_runs; then
    step "stop the Docker engine" stop_engine
  elif was_killed && ! host >/dev/null; then   # rules and bridges could be those of an engine that runs by now
    require_root_on_debian "removing what a killed Docker engine left"
    step "remove what a killed Docker engine left" clean_up
  fi
}

case ${1:-} in
start) start ;;
stop) stop ;;
host) host || die "no Docker engine answers; start one with: make cluster-up" ;;
*) die "usage: dockerd.sh start|stop|host" ;;
esac

#!/bin/sh
# The pod network of the node image that is built here: kindnetd is in no package registry, and this is all a few nodes need.
# Each node gives its pods addresses of its range, routes to the other nodes' ranges, and masquerades what leaves the cluster.
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/bin
network=/etc/cni/net.d/10-podnet.conflist

write_network() { # RANGE
  cat >/etc/cni/net.d/podnet.new <<JSON
{"cniVersion": "0.3.1", "name": "podnet", "plugins": [
  {"type": "ptp", "ipMasq": false, "mtu": 1500,
   "ipam": {"type": "host-local", "dataDir": "/run/cni-ipam-state", "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "$1"}]]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
  mv /etc/cni/net.d/podnet.new "$network"
}

while true; do
  kubectl get nodes -o 'jsonpath={range .items[*]}{.metadata.name} {.spec.podCIDR} {.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}' >/tmp/nodes || { sleep 1; continue; }
  while read -r name range address; do
    [ -n "$range" ] || continue
    if [ "$name" != "$NODE_NAME" ]; then
      ip route replace "$range" via "$address"
    elif [ ! -f "$network" ]; then
      write_network "$range"
    fi
  done </tmp/nodes
  iptables -t nat -C POSTROUTING -s "$POD_SUBNET" ! -d "$POD_SUBNET" -j MASQUERADE 2>/dev/null ||
    iptables -t nat -A POSTROUTING -s "$POD_SUBNET" ! -d "$POD_SUBNET" -j MASQUERADE
  sleep 5
done

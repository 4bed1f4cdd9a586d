"""A mount on a node whose server hangs: everything below it is asked for, and nothing ever answered.

It is a FUSE file system whose server never says its first word, as an NFS server that is gone. Refuses to know who
reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.cluster.kind import KindCluster
from tests.support.reaching import WAIT

_SERVE = """
import ctypes, os, signal, sys
os.makedirs(sys.argv[1], exist_ok=True)
device = os.open('/dev/fuse', os.O_RDWR)
options = f'fd={device},rootmode=40000,user_id=0,group_id=0,allow_other'
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b'hung', sys.argv[1].encode(), b'fuse', 0, options.encode()) != 0:
    raise SystemExit(os.strerror(ctypes.get_errno()))
print('mounted', flush=True)
signal.pause()
"""


@contextmanager
def hung_mount(cluster: KindCluster, *, node: str, folder: str) -> Iterator[str]:
    """Mount it below a folder of a node; yields its path. Pods see it where they mount the folder HostToContainer."""
    path = f"{folder}/share"
    container = {
        "name": "server",
        "image": "modelswap/operator:dev",
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", _SERVE, path],
        "securityContext": {"privileged": True, "runAsUser": 0},
        "volumeMounts": [{"name": "folder", "mountPath": folder, "mountPropagation": "Bidirectional"}],
    }
    spec = {
        "nodeName": node,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "folder", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}],
    }
    name = f"hung-{node}"
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}, "spec": spec}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    try:
        cluster.kubectl("-n", "default", "wait", f"pod/{name}", "--for=condition=Ready", WAIT)
        cluster.on_node(node, "sh", "-c", f"until grep -q ' {path} fuse ' /proc/mounts; do sleep 0.1; done")
        yield path
    finally:
        cluster.kubectl("-n", "default", "delete", "pod", name, WAIT)
        cluster.on_node(node, "umount", "--lazy", path)

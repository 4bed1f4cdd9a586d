"""A trainer as they are out there: a plain script with torch's own tools and not a line of ours, in its own process."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TRAINER = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

port, weights, names, how, size = sys.argv[1], sys.argv[2], sys.argv[3].split(","), sys.argv[4], int(sys.argv[5])
timeout = timedelta(seconds=60)
store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=timeout))
group, _ = _new_process_group_helper(
    size, 0, [], "gloo", PrefixStore("weights", store), group_name="weights", timeout=timeout
)
_world.pg_group_ranks[group] = {member: member for member in range(size)}
tensors = [load_file(weights)[name] for name in names]
if how == "leave":
    tensors = tensors[:1]
if how == "flattened":
    tensors = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])]
for tensor in tensors:
    dist.broadcast(tensor, src=0, group=group)
sys.stdin.readline()
"""


@contextlib.contextmanager
def trainer(port: int, weights: Path, names: list[str], how: str, *, size: int = 2) -> Iterator[None]:
    """Broadcast tensors of a checkpoint as rank 0 of a group that meets on a loopback port.

    Args:
        port: where it listens.
        weights: the checkpoint folder.
        names: what is sent, in this order.
        how: ``single`` or ``flattened``; ``leave`` sends the first and then goes away without a word.
        size: members of the group.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(port), str(weights / "model.safetensors"), ",".join(names), how, str(size)],
        stdin=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()

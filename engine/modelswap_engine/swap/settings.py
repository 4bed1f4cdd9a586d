"""What may be set about swaps; values only, each with its unit."""

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from modelswap_engine.swap.growth import GrowthLimits

MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SwapSettings:
    """Settings of one engine process.

    Attributes:
        state_dir: the journal and the side files of the versions live here.
        pod_uid: UID of the pod this process runs in; "" outside Kubernetes.
        boot_id: random id of this process start.
        propagation_seconds: from the readiness probe's first 503 until no endpoint routes here any more.
        probe_seconds: how long to wait for that 503 at most (there may be no kubelet).
        poll_seconds: how often dead workers are looked for.
        call_seconds: bound of one short backend call (prepare, commit, verify, rollback, resume, release), and of
            prompts that are run after the commit. This and the other bounds of backend calls (stage, load, hash) are
            the least: where the backend's own are longer, so is what is waited for (:mod:`.patience`).
        pause_seconds: bound of parking every rank at a step boundary.
        reclaim_seconds: how long an instance whose version was replaced may end what it began; then it is given up.
        admit_seconds: bound of waiting until requests in admission (tokenizing) have reached the engine.
        stage_seconds: bound of reading and staging a version; load_seconds of loading a whole one.
        resolve_seconds: bound of finding a checkpoint and, without a manifest, hashing it.
        fetch_seconds: bound of bringing the tensors of a version that lies elsewhere to this pod.
        hash_seconds: bound of one full re-hash of live tensors.
        journal_seconds: bound of writing to the journal.
        retry_seconds: first and longest pause between attempts to load.
        memory_reserve: bytes that staging leaves free.
        previous_bytes: bytes that a retained previous version may take, -1 for any; a larger one is not retained.
        previous_seconds: how long a previous version is retained, 0 for as long as there is room.
        audit_seconds: how often all live tensors are hashed again, besides after each swap; 0 for never.
        audit_bytes_per_second: upper bound of the rate of that; 0 for none.
        repair_attempts: how often damaged live tensors are loaded again before the engine is quarantined; 0 for never.
        debug_checks: allow remembering live hashes and comparing with them.
        growth: when a cold restart is advised.
        weight_peers: networks (CIDR) that weights may be exchanged with in process groups.
        export_roots: folders below which checkpoints may be written.
    """

    state_dir: Path
    pod_uid: str = ""
    served_model_name: str = ""
    software: str = ""
    boot_id: str = field(default_factory=lambda: secrets.token_hex(8))
    propagation_seconds: float = 2.0
    probe_seconds: float = 15.0
    poll_seconds: float = 1.0
    call_seconds: float = 90.0
    pause_seconds: float = 30.0
    reclaim_seconds: float = 30.0
    admit_seconds: float = 10.0
    stage_seconds: float = 1900.0
    load_seconds: float = 1900.0
    resolve_seconds: float = 1800.0
    fetch_seconds: float = 7200.0
    hash_seconds: float = 1800.0
    journal_seconds: float = 30.0
    retry_seconds: tuple[float, float] = (1.0, 30.0)
    memory_reserve: int = 64 * MIB
    previous_bytes: int = -1
    previous_seconds: float = 0.0
    audit_seconds: float = 0.0
    audit_bytes_per_second: int = 256 * MIB
    repair_attempts: int = 5
    debug_checks: bool = False
    growth: GrowthLimits = field(default_factory=GrowthLimits)
    weight_peers: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    export_roots: tuple[Path, ...] = ()

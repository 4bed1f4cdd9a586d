"""What the command line shows: messages of the protocol as tables and lines, every figure with its unit."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from modelswap_engine.protocol.adapters import AdapterRegistry, AdapterStatus
from modelswap_engine.protocol.engine_state import AuditState, CheckState, EngineState, LockState, MemoryState
from modelswap_engine.protocol.messages import CheckResult, Plan, SwapStatus, TensorCheck, VersionRef


def out(renderable: RenderableType) -> None:
    """Write to standard output."""
    Console(highlight=False, soft_wrap=True).print(renderable)


def size(count: int) -> str:
    """Return a byte count for a person; -1 means that nothing bounds it."""
    if count < 0:
        return "unlimited"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def seconds(value: float | None) -> str:
    """Return a duration for a person."""
    if value is None:
        return "-"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def version(ref: VersionRef | None) -> str:
    """Return a version in one line."""
    if ref is None:
        return "none"
    return f"{ref.version or '(no label)'}  {ref.digest[:19] or '(digest unknown)'}"


def _facts(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), value)
    return table


def state(now: EngineState) -> RenderableType:
    """Show ``GET /state``."""
    gate = now.gate
    door = "open" if gate.open else "closed"
    if gate.holders:
        door += f" by {', '.join(gate.holders)}"
    for lease in gate.leases:
        door += f" by lease {lease.id} of {lease.owner or '?'}, {seconds(lease.seconds_left)} left"
    ready = "yes" if now.ready else f"no: {now.reason or 'Starting'} {now.message}".rstrip()
    rows = [
        ("model", now.served_model_name),
        ("ready", ready + (" (quarantined)" if now.quarantined else "")),
        ("live", version(now.live)),
        ("previous", _previous(now)),
        ("revision", f"{now.revision} (owner {now.owner_uid or 'none'}, epoch {now.epoch})"),
        ("gate", f"{door}, {gate.queued} queued, the oldest for {seconds(gate.oldest_queued_seconds)}"),
        ("lock", _lock(now.lock)),
        ("operation", operation(now.operation)),
        ("memory", _memory(now.memory)),
        *([("adapters", _room(now.adapters))] if now.adapters is not None and now.adapters.slots else []),
        ("audit", _audit(now.audit)),
        ("last check", _check(now.last_check)),
        ("damaged", f"{', '.join(now.drifted[:5]) or 'nothing'}, {now.repairs} repairs"),
        ("cold restart", f"advised: {now.restart_advice}" if now.restart_advice else "not advised"),
        ("swaps", f"{now.swaps_completed} completed, {now.restarts} worker restarts"),
        ("boot", f"{now.boot_id} (pod {now.pod_uid or 'none'}, software {now.software or '?'})"),
    ]
    shown = [_adapters(now.adapters)] if now.adapters is not None and now.adapters.adapters else []
    return Group(_facts(rows), _ranks(now), *shown)


def _lock(lock: LockState) -> str:
    text = f"{lock.readers} inside ({lock.admitting} not yet with the engine)"
    if lock.oldest:
        first = lock.oldest[0]
        text += f", the oldest is {first.request_id or '?'} for {seconds(first.seconds)} on {first.version[:19]}"
    return text + (f"; {lock.writer} waits for {seconds(lock.writer_seconds)}" if lock.writer else "")


def _previous(now: EngineState) -> str:
    left = "" if now.previous_seconds_left < 0 else f", for {seconds(now.previous_seconds_left)} more"
    return version(now.previous) + left


def _memory(memory: MemoryState) -> str:
    kinds = {
        "model": memory.model_bytes,
        "staged": memory.staged_bytes,
        "previous": memory.previous_bytes,
        "KV cache": memory.kv_cache_bytes,
        "adapters": memory.adapter_bytes,
        "RSS": memory.rss_bytes,
        "limit": memory.limit_bytes,
    }
    text = ", ".join(f"{name} {size(count)}" for name, count in kinds.items())
    if memory.device_limit_bytes < 0:
        return text
    return f"{text}; {memory.device}: {size(memory.device_available_bytes)} of {size(memory.device_limit_bytes)} free"


def _ranks(now: EngineState) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("rank", "replica", "pid", "alive", "proved", "running", "restarts", "boot id"):
        table.add_column(column)
    for rank in now.ranks:
        proved = rank.digest[:19] or "nothing"
        numbers = [str(number) for number in (rank.rank, rank.replica, rank.pid)]
        alive = "yes" if rank.alive else "no"
        table.add_row(*numbers, alive, proved, str(rank.running), str(rank.restarts), rank.boot_id)
    return table


def _check(check: CheckState | None) -> str:
    return _audit(check) + (f" ({check.action} of {check.pattern})" if check is not None else "")


def _audit(audit: AuditState | None) -> str:
    if audit is None or audit.ok is None:
        return "none yet"
    if audit.ok:
        return f"ok, {audit.tensors} tensors ({size(audit.bytes)}) in {seconds(audit.seconds)} at {audit.finished_at}"
    return f"MISMATCH in {', '.join(audit.mismatched[:5])} at {audit.finished_at}"


def operation(status: SwapStatus | None) -> str:
    """Show an operation in one line."""
    if status is None:
        return "none"
    text = f"{status.operation_id} {status.state.value} to {version(status.target)}"
    if status.error is not None:
        return f"{text}: {status.error.message}"
    hold = status.hold
    waits = hold is not None and hold.held and not status.state.terminal
    return f"{text}, waits to be told to go on ({hold.seconds_left:.0f} s left)" if hold and waits else text


def plan(found: Plan) -> RenderableType:
    """Show a plan."""
    rows = [
        ("from", found.from_digest[:19] or "-"),
        ("to", found.to_digest[:19] or "-"),
        ("loading", found.mode.value),
        ("tensors", f"{found.changed_tensors} of {found.total_tensors} change, in {found.groups} groups"),
        ("bytes", f"{size(found.changed_bytes)} of {size(found.total_bytes)} change"),
        ("to fetch", size(found.bytes_to_fetch)),
        ("memory", f"{size(found.memory_needed)} needed, {size(found.memory_available)} available"),
    ]
    rows += [("side files", ", ".join(found.side_files))] if found.side_files else []
    rows += [("adapters", "; ".join(found.adapters))] if found.adapters else []
    rows += list(found.provenance.items())
    rows += [("signed by", found.signed_by)] if found.signed_by else []
    lines: list[RenderableType] = [_facts(rows)]
    for refusal in found.refusals:
        lines.append(Text(f"refused: {refusal.code}: {refusal.message}", style="red"))
        if refusal.advice:
            lines.append(Text(f"next: {refusal.advice}"))
    return Group(*lines)


def outcome(status: SwapStatus) -> RenderableType:
    """Show how an operation stands or ended."""
    window = status.commit_window_microseconds
    rows = [
        ("operation", status.operation_id),
        ("state", status.state.value),
        ("from", version(status.source)),
        ("to", version(status.target)),
    ]
    if status.plan is not None:
        rows.append(("changed", f"{status.plan.changed_tensors} tensors, {size(status.plan.changed_bytes)}"))
    rows += [
        ("fetched", f"{size(status.bytes_fetched)} of tensors, {size(status.header_bytes)} of headers and side files"),
        ("from peers", size(status.bytes_from_peers)),
        ("stop latency", seconds(status.stop_latency_seconds)),
        ("commit window", "-" if window is None else seconds(window / 1e6)),
        ("gate closed", seconds(status.pause_seconds)),
        ("total", seconds(status.total_seconds)),
    ]
    lines: list[RenderableType] = [_facts(rows)]
    if status.error is not None:
        lines.append(Text(f"error: {status.error.code}: {status.error.message}", style="red"))
        if status.error.advice:
            lines.append(Text(f"next: {status.error.advice}"))
    return Group(*lines)


def check(found: CheckResult) -> RenderableType:
    """Show the result of a check."""
    verdict = "MISMATCH" if not found.ok else "ok as far as it could be seen" if found.unverifiable else "ok"
    amount = f"{found.checked} tensors, {size(found.bytes)} in {seconds(found.seconds)}"
    head = f"{verdict}: {amount}, version {found.digest[:19]}"
    lines: list[RenderableType] = [Text(head, style="" if found.ok else "red")]
    lines += [
        Text(f"{item.name} ({item.coordinates} coordinates): expected {item.expected}, live {item.actual}{_on(item)}")
        for item in found.mismatched
    ]
    lines += [Text(f"not read by the engine: {', '.join(found.unread)}")] if found.unread else []
    if found.unverifiable:
        lines.append(
            Text(f"cannot be seen while requests run, not checked (--still): {len(found.unverifiable)} tensors")
        )
    return Group(*lines)


def _on(item: TensorCheck) -> str:
    return f" on rank {', '.join(map(str, item.ranks))}" if item.ranks else ""


def adapter(status: AdapterStatus) -> RenderableType:
    """Show one adapter."""
    rows = [
        ("adapter", status.id),
        ("state", status.state.value + (", pinned" if status.pinned else "")),
        ("digest", status.digest),
        ("base", status.base_digest or "any of its shape"),
        ("source", status.uri),
        ("size", f"rank {status.rank}, {size(status.bytes)}"),
        ("in use", f"{status.references} requests"),
    ]
    return _facts(rows)


def adapters(found: AdapterRegistry) -> RenderableType:
    """Show ``GET /adapters``."""
    rows = [("adapters", f"none can be served: {found.reason}")] if not found.slots else [("adapters", _room(found))]
    return Group(_facts(rows), *([_adapters(found)] if found.adapters else []))


def _room(found: AdapterRegistry) -> str:
    return (
        f"{found.slots_used} of {found.slots} slots, {size(found.host_bytes)} of {size(found.host_bytes_limit)}, "
        f"{found.loads} loads, {found.evictions} evictions"
    )


def _adapters(found: AdapterRegistry) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("adapter", "state", "slot", "size", "in use", "idle", ""):
        table.add_column(column)
    for status in found.adapters:
        note = status.error.message if status.error is not None else "pinned" if status.pinned else ""
        slot = "-" if status.slot < 0 else str(status.slot)
        used, idle = str(status.references), seconds(status.idle_seconds)
        table.add_row(status.id, status.state.value, slot, size(status.bytes), used, idle, note)
    return table

"""What an external engine is, in the words of the protocol. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from modelswap_engine.backends.external.control import EngineFacts
from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.merging import summed
from modelswap_engine.backends.port import Reply
from modelswap_engine.protocol.engine_state import Capabilities, MemoryState, RankState
from modelswap_engine.protocol.errors import Internal, from_body
from modelswap_engine.protocol.policy import TrafficMode

BY_DISK: Final = "disk"
"""How tensors became live that the engine loaded by itself."""

NO_OVERLAP: Final = "the engine runs one instance of a model"
NO_MIXTURE: Final = "the proxy before the engine could not say which version made which part of an answer"
_REFUSED: Final = {
    TrafficMode.OVERLAP.value: NO_OVERLAP,
    TrafficMode.RECOMPUTE.value: NO_MIXTURE,
    TrafficMode.FREEZE.value: NO_MIXTURE,
}


def capabilities(facts: EngineFacts | None, ranks: Sequence[wire.Facts], *, adapters: bool) -> Capabilities:
    """Say what can be done, as far as the engine has answered."""
    if facts is None:
        return Capabilities(kind="external", traffic_modes=[], rollback=False, commit_method="")
    return Capabilities(
        kind=facts.engine,
        version=f"{facts.engine} {facts.version}",
        traffic_modes=[mode for mode in TrafficMode if mode.value not in _REFUSED],
        refused_modes=_REFUSED,
        rollback=True,
        commit_method=",".join(sorted({rank.commit_method for rank in ranks})),
        max_loras=facts.adapters.slots if adapters else 0,
        tries_live=True,
    )


def plain_capabilities(facts: EngineFacts | None, *, rollback: bool) -> Capabilities:
    """Say what can be done over an engine's own routes alone."""
    found = capabilities(facts, (), adapters=False)
    return replace(found, rollback=rollback, commit_method=BY_DISK) if facts is not None else found


def ranks(
    facts: Sequence[wire.Facts], boot_ids: Sequence[str], *, alive: bool, proven: Mapping[int, str]
) -> list[RankState]:
    """Say who is alive, and what each rank has proven."""
    return [
        RankState(
            rank=rank,
            boot_id=boot_id,
            pid=known.pid,
            alive=alive,
            digest=proven.get(rank, "") if alive else "",
        )
        for rank, (known, boot_id) in enumerate(zip(facts, boot_ids, strict=True))
    ]


def memory(answers: Sequence[wire.Answer]) -> MemoryState:
    """Sum the memory of all ranks, which share one container.

    Raises:
        ModelswapError: a rank could not say.
    """
    states = []
    for answer in answers:
        if answer.reply.error is not None:
            raise from_body(answer.reply.error)
        if answer.memory is None:
            raise Internal(f"rank {answer.reply.rank} answered a memory call with nothing")
        states.append(answer.memory)
    return summed(states)


def replies(answers: Sequence[wire.Answer]) -> list[Reply]:
    """Return what the port wants to know of each rank."""
    return [answer.reply for answer in answers]

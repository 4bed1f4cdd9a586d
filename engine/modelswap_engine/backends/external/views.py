"""What an external engine is, in the words of the protocol. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from modelswap_engine.backends.external.control import EngineFacts
from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.port import Reply
from modelswap_engine.protocol.engine_state import Capabilities, MemoryState, RankState
from modelswap_engine.protocol.errors import Internal, from_body
from modelswap_engine.protocol.policy import TrafficMode

NO_OVERLAP: Final = "the engine runs one instance of a model"
NO_MIXTURE: Final = "the proxy before the engine could not say which version made which part of an answer"
_REFUSED: Final = {
    TrafficMode.OVERLAP.value: NO_OVERLAP,
    TrafficMode.RECOMPUTE.value: NO_MIXTURE,
    TrafficMode.FREEZE.value: NO_MIXTURE,
}


def capabilities(facts: EngineFacts | None, ranks: Sequence[wire.Facts]) -> Capabilities:
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
    )


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
    return MemoryState(
        model_bytes=sum(state.model_bytes for state in states),
        staged_bytes=sum(state.staged_bytes for state in states),
        previous_bytes=sum(state.previous_bytes for state in states),
        kv_cache_bytes=sum(state.kv_cache_bytes for state in states),
        adapter_bytes=sum(state.adapter_bytes for state in states),
        rss_bytes=sum(state.rss_bytes for state in states),
        limit_bytes=min(state.limit_bytes for state in states),
        available_bytes=min(state.available_bytes for state in states),
        device=", ".join(dict.fromkeys(state.device for state in states)),
        device_limit_bytes=_summed([state.device_limit_bytes for state in states]),
        # Ranks share every version evenly, so the fullest device decides.
        device_available_bytes=_summed([min(state.device_available_bytes for state in states)] * len(states)),
    )


def _summed(figures: Sequence[int]) -> int:
    return sum(figures) if min(figures) >= 0 else -1


def replies(answers: Sequence[wire.Answer]) -> list[Reply]:
    """Return what the port wants to know of each rank."""
    return [answer.reply for answer in answers]

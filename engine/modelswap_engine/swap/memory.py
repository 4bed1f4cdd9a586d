"""Where the memory is, as the engine and its container say, and whether it grows from swap to swap.

The holder of the mutex asks the engine; what bounds the container may be asked at any time.
"""

import msgspec

from modelswap_engine.limits import Memory, MemoryProbe
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.swap.clock import Offload
from modelswap_engine.swap.engine import Engine
from modelswap_engine.swap.growth import Growth, GrowthLimits, observe


class MemoryWatch:
    """What is known of the memory.

    Args:
        engine: is asked.
        probe: tells the container's limits.
        offload: runs the probe, which blocks.
        limits: when growth is to be told.

    Attributes:
        state: the latest answer.
        growth: what the samples since the last whole load have shown.
    """

    def __init__(self, engine: Engine, *, probe: MemoryProbe, offload: Offload, limits: GrowthLimits) -> None:
        self._engine = engine
        self._probe = probe
        self._offload = offload
        self._limits = limits
        self._loaded_after = 0
        self.state = MemoryState()
        self.growth = Growth()

    async def refresh(self, *, completed: int) -> None:
        """Ask the engine and the container; ``completed`` swaps were made since the process started."""
        await self._bound(await self._engine.memory())
        swaps = completed - self._loaded_after
        self.growth = observe(self.growth, self.state, swaps=swaps, limits=self._limits)

    async def refresh_limits(self) -> None:
        """Ask the container alone: the engine is dead and holds nothing."""
        await self._bound(MemoryState())

    async def room(self) -> int:
        """Ask the container alone how many bytes may still be used; -1 when nothing bounds it."""
        return (await self._limit()).available

    def loaded(self, *, completed: int) -> None:
        """Memory is as after a start: a whole version was loaded."""
        self.growth, self._loaded_after = Growth(), completed

    async def _bound(self, memory: MemoryState) -> None:
        bound = await self._limit()
        known = [figure for figure in (memory.available_bytes, bound.available) if figure >= 0]
        limits = [figure for figure in (memory.limit_bytes, bound.limit) if figure >= 0]
        self.state = msgspec.structs.replace(
            memory, available_bytes=min(known, default=-1), limit_bytes=min(limits, default=-1)
        )

    async def _limit(self) -> Memory:
        bound: Memory = await self._offload(self._probe.read)
        return bound

"""Measures what was asked for of the proxy and of real engines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from bench.external import versions
from bench.external.door import measure_first_tokens
from bench.external.engines import ENGINES
from bench.external.report import ExternalResult
from bench.external.swaps import measure_engine
from bench.turns import Budget

PROXY: Final = "proxy"
EXTERNAL: Final = (PROXY, *ENGINES)
LARGE_BYTES: Final = 10**9


async def measure_external(
    wanted: Collection[str], *, budget: Budget, turns: int, report: Callable[[str], None]
) -> ExternalResult:
    """Measure the proxy alone, and each engine with a small and a larger model."""
    found = ExternalResult()
    if PROXY in wanted:
        found.first_tokens.extend(await measure_first_tokens(budget=budget, turns=turns, report=report))
    for name in ENGINES:
        if name not in wanted:
            continue
        for made in (versions.small(), versions.random(LARGE_BYTES)):
            with tempfile.TemporaryDirectory(prefix="modelswap-bench-") as folder:
                engine = ENGINES[name](Path(folder))
                result = await measure_engine(engine, made, budget=budget, turns=turns, report=report)
            found.routes.extend(result.routes)
            found.beside.extend([result.beside] if result.beside is not None else [])
            found.doors.extend([result.door] if result.door is not None else [])
    return found

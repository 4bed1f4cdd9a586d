"""The ports of a sidecar for each test; a call of ours that blocks the event loop fails the test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx
from structlog.testing import capture_logs

from tests.support.ports import Ports, open_ports


@pytest.fixture(autouse=True)
def nothing_blocks() -> Iterator[None]:
    """Fail when our HTTP code blocks the event loop."""
    with blockbuster_ctx("modelswap_engine.http"):
        yield


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep log lines out of what commands print."""
    with capture_logs():
        yield


@pytest.fixture
async def ports(tmp_path: Path) -> AsyncIterator[Ports]:
    """Both ports, serving version 1.0."""
    async with open_ports(tmp_path) as opened:
        yield opened

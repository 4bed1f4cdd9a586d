"""The ports of a sidecar for each test; a call of ours that blocks the event loop fails the test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.support.ports import Ports, open_ports
from tests.support.strict import watched


@pytest.fixture(autouse=True)
def nothing_blocks() -> Iterator[None]:
    """Fail when our code blocks the event loop."""
    with watched():
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

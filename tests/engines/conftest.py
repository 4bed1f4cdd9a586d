"""Real servers of tests in this folder; each is started once for a worker of the test run."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.support import engines
from tests.support.models import Pair, disjoint_pair
from tests.support.sglang import EXACT, Sglang, with_our_half

LIMIT_SECONDS = 900
"""Of a test with all that it starts: cold, beside others, on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bound what starts engines by what that may take, and not by the bound of other tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return disjoint_pair(tmp_path_factory.mktemp("models"), hidden=128)


@pytest.fixture(scope="session")
def vllm(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[engines.EngineServer]:
    folder: Path = tmp_path_factory.mktemp("vllm")
    with engines.running(engines.vllm(pair.old, folder, "--distributed-executor-backend", "uni")) as server:
        yield server


@pytest.fixture(scope="session")
def sglang(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    """With its overlapping schedule, in which a step is begun before the results of the one before are looked at."""
    folder: Path = tmp_path_factory.mktemp("sglang")
    server = Sglang(folder, options=EXACT, variables=with_our_half(folder / "beside"))
    try:
        yield server.start(pair.old).wait_ready()
    finally:
        server.kill()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as made:
        yield made

"""The pair of tiny models with disjoint vocabularies, and engine processes that end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.serve import Served


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``v1`` and ``v2``."""
    from tests.support.models import disjoint_pair  # brings torch, which fast tests do not want

    root = tmp_path_factory.mktemp("models")
    disjoint_pair(root)
    return root


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path, pair: Path) -> Iterator[Serve]:
    """Make an engine process on version 1.0; its log is shown when the test fails."""
    started: list[Served] = []

    def make(*options: str, fault: str = "") -> Served:
        served = Served(tmp_path, pair / "v1", options=["--version", "1.0", *options], roots=[pair, tmp_path])
        started.append(served)
        return served.start(fault=fault).wait_ready()

    yield make
    for served in started:
        served.stop()
        print(served.tail(lines=100))


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, pair: Path) -> Iterator[Served]:
    """One engine process for the tests of a file: starting one takes longer than all that it does."""
    folder = tmp_path_factory.mktemp("served")
    served = Served(folder, pair / "v1", options=["--version", "1.0"], roots=[pair, pair.parent])
    yield served.start().wait_ready()
    served.stop()


@pytest.fixture
def served(process: Served, pair: Path) -> Served:
    """That process, serving version 1.0 whatever the test before left behind."""
    live = process.state().live
    if live is None or live.version != "1.0":
        done = process.command("swap", "--source", str(pair / "v1"), "--version", "1.0")
        assert done.code == 0, done.out + done.err + process.tail()
    return process

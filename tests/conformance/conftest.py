"""``--backend NAME``: which backends are put to the suite; without it those of this repository, each in its lane."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from modelswap_engine.protocol.errors import ModelswapError
from tests.conformance.candidates import OURS, Candidate, Subject, Versions, candidate
from tests.conformance.case import Case

LANES: Final = {
    "embedded": [pytest.mark.model],
    "vllm": [pytest.mark.engine],
    "sglang": [pytest.mark.engine],
    # One is started anew for many of them, and the other has tests of its own like these.
    "vllm-plain": [pytest.mark.engine, pytest.mark.full],
    "sglang-plain": [pytest.mark.engine, pytest.mark.full],
}
EXTERNAL: Final = ("vllm", "sglang")
STARTED_ANEW: Final = "a_killed_engine_is_lost_until_a_load_brings_it_back"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        action="append",
        metavar="NAME",
        help=f"backend to put to tests/conformance: one of {', '.join(OURS)}, or package.module:function of a factory",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "offered" in metafunc.fixturenames:
        asked: list[str] | None = metafunc.config.getoption("--backend", default=None)
        params = [pytest.param(name, marks=LANES.get(name, ())) for name in asked or OURS]
        metafunc.parametrize("offered", params, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have a promise that a backend declares not to keep be one that it is seen not to keep.

    An engine that is a server of its own takes long to start: in each run one is killed in ``tests/engines``, and here
    in long ones.
    """
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or "offered" not in call.params:
            continue
        promise = item.originalname.removeprefix("test_")  # type: ignore[attr-defined]
        reason = candidate(call.params["offered"]).exceptions.get(promise)
        if promise == STARTED_ANEW and call.params["offered"] in EXTERNAL:
            item.add_marker(pytest.mark.full)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True, raises=(AssertionError, ModelswapError)))


@pytest.fixture(scope="session")
def offered(request: pytest.FixtureRequest) -> Candidate:
    return candidate(request.param)


@pytest.fixture(scope="session")
def versions(offered: Candidate, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    from tests.support import models  # loads torch

    root = tmp_path_factory.mktemp("versions")
    pair = models.disjoint_pair(root, hidden=offered.hidden, dtype=offered.dtype)
    names = [name for name in models.tensor_names(pair.old) if name != "lm_head.weight"]
    sides = Path(shutil.copytree(pair.old, root / "sides", ignore=shutil.ignore_patterns("*.safetensors")))
    full = models.write_variant(pair.old, root / "full", names, seed=7)
    return Versions(old=pair.old, new=pair.new, full=full, sides=sides)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def subject(
    offered: Candidate, versions: Versions, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    folder: Path = tmp_path_factory.mktemp("engine")
    async with offered.begin(versions, folder) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def case(subject: Subject, versions: Versions) -> Case:
    """An engine that holds the old version, wherever the test before left it."""
    made = Case(subject, versions)
    await made.load(versions.old)
    return made

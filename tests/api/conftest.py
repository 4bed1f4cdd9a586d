"""One operator process for this folder, with the rights that the chart gives it and not one more."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.apiserver import ApiServer
from tests.support.custom import definitions, rest
from tests.support.fake_pods import Slot, digest
from tests.support.fake_sidecar import Content
from tests.support.operated import OperatorProcess, granted
from tests.support.rest import Rest

__all__ = ["OperatorProcess", "definitions", "granted", "rest"]

NAMESPACE = "operated"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def operator(definitions: ApiServer, rest: Rest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    home = tmp_path_factory.mktemp("operator")
    process = OperatorProcess(definitions, home, account=granted(definitions, rest, home, namespace=NAMESPACE))
    process.start()
    process.wait_ready()
    yield process
    process.stop()


CONTENTS = {
    "file:///models/1.0": Content(digest("a")),
    "file:///models/1.1": Content(digest("b")),
    "file:///models/1.2": Content(digest("c")),
}


@pytest.fixture
async def slot(operator: OperatorProcess, rest: Rest) -> AsyncIterator[Slot]:
    found = Slot(rest, namespace=NAMESPACE, name=f"slot-{next(_numbers)}", contents=dict(CONTENTS))
    yield found
    await found.remove()

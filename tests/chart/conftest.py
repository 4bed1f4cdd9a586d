"""Helm and an API server for the tests of this folder."""

import pytest

from tests.support.charts import Charts
from tests.support.custom import definitions, rest

__all__ = ["charts", "definitions", "rest"]


@pytest.fixture(scope="session")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Charts:
    return Charts(tmp_path_factory.mktemp("helm"))

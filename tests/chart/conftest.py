"""Helm for the tests of this folder."""

import pytest
from tests.support.charts import Charts


@pytest.fixture(scope="session")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Charts:
    return Charts(tmp_path_factory.mktemp("helm"))

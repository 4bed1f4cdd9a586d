"""A namespace of an API server that knows the definitions, for each test of this folder."""

import itertools

import pytest

from tests.support.apiserver import ApiServer
from tests.support.custom import Namespace, definitions, rest
from tests.support.rest import Rest

__all__ = ["definitions", "namespace", "rest"]

_numbers = itertools.count(1)


@pytest.fixture
def namespace(definitions: ApiServer, rest: Rest) -> Namespace:
    return Namespace(definitions, rest, f"crds-{next(_numbers)}")

"""Fixtures that every folder of tests may ask for; each is made in `tests/support`."""

from tests.support.apiserver import api_server, own_api_server

__all__ = ["api_server", "own_api_server"]

"""Fixtures that every folder of tests may ask for (each is made in `tests/support`), and how long Hypothesis looks.

A run of `make test` tries the same examples each time, so that it fails for what was changed and for nothing else;
`make test-full` draws new ones.
"""

import os
import signal

import pytest
from hypothesis import settings
from xdist.remote import Producer

from tests.support.apiserver import api_server, own_api_server
from tests.support.by_server import ByServer
from tests.support.disk import unsynced
from tests.support.servers.fixtures import (
    azure_server,
    google_server,
    hub,
    object_server,
    proxied,
    registry_server,
    s3_server,
    web_server,
)

__all__ = [
    "api_server",
    "azure_server",
    "google_server",
    "hub",
    "object_server",
    "own_api_server",
    "proxied",
    "registry_server",
    "s3_server",
    "web_server",
]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByServer | None:
    """Have tests that share a server run in one worker, where those of a file do."""
    return ByServer(config, log) if config.getvalue("dist") == "loadfile" else None


settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.register_profile("new", deadline=None, print_blob=True)
settings.load_profile("new" if os.environ.get("FULL") else "same")

unsynced()
# Tensors of tests are tiny: threads that wait for one another would cost all the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Asked to end, a run stops what its fixtures started, as it does on an interrupt.
signal.signal(signal.SIGTERM, signal.default_int_handler)

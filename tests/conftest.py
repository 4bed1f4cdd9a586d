"""Fixtures that every folder of tests may ask for (each is made in `tests/support`), and how long Hypothesis looks.

A run of `make test` tries the same examples each time, so that it fails for what was changed and for nothing else;
`make test-full` draws new ones.
"""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings
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


# What an example takes says how busy the machine is, and nothing of what is tried.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, database=None, **_UNTIMED)
settings.register_profile("new", print_blob=True, **_UNTIMED)
settings.load_profile("new" if os.environ.get("FULL") else "same")

unsynced()
# Tensors of tests are tiny: threads that wait for one another would cost all the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Asked to end, a run stops what its fixtures started, as it does on an interrupt.
signal.signal(signal.SIGTERM, signal.default_int_handler)

"""Azurite on loopback: Azure Blob Storage with one account and its key. Microsoft's identities do not exist here."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Final

from tests.support.free_ports import free_port
from tests.support.servers.faults import Answer
from tests.support.servers.listening import listening
from tests.support.servers.stores import ask
from tests.support.tools import source_server

ACCOUNT: Final = "tester"
SECRET: Final = b"not-a-secret"
_VERSION: Final = "2023-11-03"
_EXPIRED: Final = b'<?xml version="1.0" encoding="utf-8"?><Error><Code>AuthenticationFailed</Code></Error>'


class AzureServer:
    """One server, its data in memory; see :class:`tests.support.servers.stores.ObjectServer`."""

    scheme = "az"
    secret = base64.b64encode(SECRET).decode()
    expired = Answer(403, {"Content-Type": "application/xml"}, _EXPIRED)

    def __init__(self, home: Path) -> None:
        """Start it."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        accounts = f"AZURITE_ACCOUNTS={ACCOUNT}:{self.secret}"
        flags = ("--inMemoryPersistence", "--silent", "--disableTelemetry", "--blobPort", str(port))
        command = (shutil.which("env") or "env", accounts, str(source_server("azurite")), *flags)
        self._child = listening("azurite", command, port=port, home=home)

    def bucket(self, name: str) -> str:
        """Make a container, and return its name."""
        date = formatdate(usegmt=True)
        where = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n{where}"
        signature = base64.b64encode(hmac.digest(SECRET, signed.encode(), hashlib.sha256)).decode()
        headers = {
            "x-ms-date": date, "x-ms-version": _VERSION, "Authorization": f"SharedKey {ACCOUNT}:{signature}",
        }  # fmt: skip
        ask(self.url, "PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
        return name

    def settings(self, endpoint: str, *, mistaken: bool = False) -> Mapping[str, str]:
        """Return the keys of a Secret."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"wrong").decode() if mistaken else self.secret,
            "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }

    def close(self) -> None:
        """Stop it."""
        self._child.stop()

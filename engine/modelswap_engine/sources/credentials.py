"""Credentials as Kubernetes mounts them: a folder for each name, a file for each key, read anew whenever needed.

They are never part of a URI, a message or a log: what is handed on are the values, to the client that signs with them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from modelswap_engine.protocol.errors import CredentialsNotMounted, SourceUnreadable

MAX_BYTES: Final = 1 << 20
CA: Final = "ca.crt"
"""Certificates (PEM) to trust besides those of the system."""


class Credentials:
    """All that are mounted.

    Args:
        folder: one sub-folder for each name; None: there are none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, name: str) -> Mapping[str, str]:
        """Return key → value of the credentials of a name; "" has none, so that the process's own count.

        Raises:
            CredentialsNotMounted: nothing is mounted under that name.
            SourceUnreadable: a file cannot be read.
        """
        if not name:
            return {}
        if self._folder is None or "/" in name or name.startswith(".") or not (self._folder / name).is_dir():
            raise CredentialsNotMounted(
                f"credentials {name[:100]!r} are not mounted in this pod",
                advice="name a Secret in the engine chart (sources.credentials) and roll the pods, or correct the name",
                details={"credentials": name[:100]},
            )
        try:
            files = [entry for entry in (self._folder / name).iterdir() if entry.is_file()]
            # What the kubelet keeps beside them begins with two dots; `.dockerconfigjson` is a key like any other.
            return {entry.name: _text(entry) for entry in files if not entry.name.startswith("..")}
        except (OSError, UnicodeDecodeError) as error:
            raise SourceUnreadable(
                f"credentials {name!r}: {getattr(error, 'strerror', '') or 'not text'}", advice="look at the Secret"
            ) from None


def _text(file: Path) -> str:
    with file.open(encoding="utf-8") as stream:
        text = stream.read(MAX_BYTES)
    return text if file.name == CA else text.strip()

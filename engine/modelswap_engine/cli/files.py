"""Writing files for people: a reader sees all of one or none."""

import os
import tempfile
from pathlib import Path

from modelswap_engine.protocol.errors import SourceUnreadable


def write_whole(path: Path, data: bytes) -> None:
    """Write through a new file and a rename; a link at this name is replaced, not followed.

    Raises:
        SourceUnreadable: it cannot be written.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                os.fchmod(stream.fileno(), 0o644)
                stream.write(data)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise SourceUnreadable(
            f"{path}: cannot be written: {error.strerror}", advice="name a folder that exists and is writable"
        ) from None

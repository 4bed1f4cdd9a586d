"""Tar archives as packing tools write them."""

import io
import tarfile
from collections.abc import Mapping


def packed(
    files: Mapping[str, bytes], *, form: int = tarfile.PAX_FORMAT, links: Mapping[str, str] | None = None
) -> bytes:
    """Return an archive of files, and of symbolic links (name → where to)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return out.getvalue()

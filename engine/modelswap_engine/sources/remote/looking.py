"""Whether a place still holds what was found there: revisions of files are compared, and only a manifest is read."""

import asyncio

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.layout import SIGNATURE_FILE
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES
from modelswap_engine.protocol.errors import Refused, SourceNotFound
from modelswap_engine.sources.port import others
from modelswap_engine.sources.remote.contents import OpenFolder, Places, read_whole
from modelswap_engine.sources.remote.port import FileStat


async def look(open_folder: OpenFolder, places: Places, *, digest: str) -> str:
    """See :meth:`sources.port.Resolved.moved`; a file that is not there is no other content.

    Raises:
        SourceNotFound: none of the files is there.
        SourceDenied, SourceUnreadable, SourceChanged: not now.
    """
    changed: dict[tuple[str, str], FileStat] = {}
    seen = 0
    for place, known in places.items():
        there = await (await open_folder(place)).files(known)
        seen += sum(name in there for name in known)
        changed |= {(place, name): there[name] for name in known if name in there and there[name] != known[name]}
    if not seen:
        raise SourceNotFound(f"{(await open_folder('')).uri}: nothing of it is there", advice="upload it again")
    changed.pop(("", SIGNATURE_FILE), None)  # the same content, signed again
    manifest = changed.get(("", MANIFEST_FILE))
    if manifest is not None:
        data = await read_whole(await open_folder(""), MANIFEST_FILE, manifest, limit=MAX_MANIFEST_BYTES)
        try:
            found = (await asyncio.to_thread(manifests.decode, data)).digest
        except Refused:
            return others([MANIFEST_FILE])
        return found if found != digest else ""
    return others(name for _, name in changed)

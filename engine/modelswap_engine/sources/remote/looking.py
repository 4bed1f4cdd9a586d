"""Whether a place still holds what was found there: revisions of files are compared, and only a manifest is read."""

import asyncio

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.layout import SIGNATURE_FILE
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES
from modelswap_engine.protocol.errors import Refused, SourceNotFound
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.sources.port import others
from modelswap_engine.sources.remote.contents import OpenFolder, Places, read_whole
from modelswap_engine.sources.remote.port import FileStat
from modelswap_engine.sources.remote.records import revision_of


async def look(open_folder: OpenFolder, places: Places, *, digest: str) -> SourceLook:
    """See :meth:`sources.port.Resolved.moved`; a file that is not there is no other content.

    Raises:
        SourceNotFound: none of the files is there.
        SourceDenied, SourceUnreadable, SourceChanged: not now.
    """
    changed: dict[tuple[str, str], FileStat] = {}
    now: dict[str, dict[str, FileStat]] = {}
    for place, known in places.items():
        there = await (await open_folder(place)).files(known)
        now[place] = {name: there[name] for name in known if name in there}
        changed |= {(place, name): stat for name, stat in now[place].items() if stat != known[name]}
    if not any(now.values()):
        raise SourceNotFound(f"{(await open_folder('')).uri}: nothing of it is there", advice="upload it again")
    changed.pop(("", SIGNATURE_FILE), None)  # the same content, signed again
    now.get("", {}).pop(SIGNATURE_FILE, None)
    revision = revision_of(now)
    manifest = changed.get(("", MANIFEST_FILE))
    if manifest is not None:
        data = await read_whole(await open_folder(""), MANIFEST_FILE, manifest, limit=MAX_MANIFEST_BYTES)
        try:
            found = (await asyncio.to_thread(manifests.decode, data)).digest
        except Refused:
            return SourceLook(found=others([MANIFEST_FILE]), revision=revision)
        return SourceLook(found=found if found != digest else "", revision=revision)
    return SourceLook(found=others(name for _, name in changed), revision=revision)

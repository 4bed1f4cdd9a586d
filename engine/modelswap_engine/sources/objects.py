"""``s3://``, ``gs://``, ``az://``: folders in object stores, by obstore (ranges, signing, workload identity).

Knows nothing of checkpoints. What a store's client says of an error can hold signed addresses: only its kind is told.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import obstore
from obstore import exceptions
from obstore.store import from_url

from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.protocol.errors import (
    SourceChanged,
    SourceDenied,
    SourceNotAllowed,
    SourceNotFound,
    SourceUnreadable,
)
from modelswap_engine.sources.credentials import CA, Credentials
from modelswap_engine.sources.remote.port import FileStat

SCHEMES: Final[Mapping[str, str]] = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
"""Scheme → how the names of its settings begin, in the environment as in mounted credentials."""
CHUNK_BYTES: Final = 4 << 20
_STALL: Final = timedelta(seconds=30)
_CONNECT: Final = timedelta(seconds=10)
_WHOLE: Final = timedelta(minutes=10)
_RETRY: Final[Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=60)}
_NO_RIGHT: Final = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


class ObjectStores:
    """Opens folders of buckets; see :class:`sources.remote.port.Opener`.

    Args:
        credentials: those that are mounted; the process's own (environment, workload identity) otherwise.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def open(self, uri: str, *, credentials: str) -> "ObjectFolder":
        """Open a folder by its URI; nothing is asked yet."""
        values = await asyncio.to_thread(self._credentials.read, credentials)
        begins = SCHEMES[uri.partition(":")[0].lower()]
        config: Any = {key.lower(): value for key, value in values.items() if key.upper().startswith(begins)}
        options: Any = {"read_timeout": _STALL, "connect_timeout": _CONNECT, "timeout": _WHOLE}
        if CA in values:
            options["root_certificate"] = values[CA]
        try:
            store = from_url(uri, config=config, client_options=options, retry_config=_RETRY)
        except (exceptions.BaseError, ValueError) as error:
            raise SourceNotAllowed(
                f"{shown(uri, 200)}: its store cannot be used: {type(error).__name__}",
                advice="look at the settings in the credentials, and at the guide of object stores",
            ) from None
        return ObjectFolder(uri, store)


class ObjectFolder:
    """A folder of a bucket.

    Args:
        uri: where it is.
        store: of obstore, at the folder.
    """

    def __init__(self, uri: str, store: Any) -> None:
        self.uri = uri
        self._store = store

    async def files(self, names: Iterable[str]) -> Mapping[str, FileStat]:
        """List the folder; where that is not allowed, ask for each file."""
        try:
            with self._telling("its list"):
                listed = await obstore.list_with_delimiter_async(self._store)
        except SourceDenied:
            return await self._asked(sorted(set(names)))
        except SourceChanged:
            raise SourceNotFound(f"{self.uri}: there is no such bucket", advice="check the address") from None
        return {str(meta["path"]).rpartition("/")[2]: _stat(meta) for meta in listed["objects"]}

    async def _asked(self, names: list[str]) -> Mapping[str, FileStat]:
        found, refused = {}, 0
        for name in names:
            try:
                with self._telling(name):
                    found[name] = _stat(await obstore.head_async(self._store, name))
            except SourceChanged:
                continue  # it is not there
            except SourceDenied:  # S3 answers so for a missing object to who may not list
                refused += 1
        if refused == len(names):
            raise self._no_right("it")
        return found

    async def stream(self, name: str, start: int, stop: int, *, stat: FileStat) -> AsyncIterator[bytes]:
        """Yield a range of an object, provided that it has the revision."""
        with self._telling(name):
            options: Any = {"range": (start, stop)} | ({"if_match": stat.revision} if stat.revision else {})
            result = await obstore.get_async(self._store, name, options=options)
            if _stat(result.meta).revision != stat.revision:
                raise self._changed(name)
            if result.range != (start, stop):
                raise SourceUnreadable(f"{name}: bytes {result.range} came instead of {(start, stop)}")
            async for piece in result.stream(min_chunk_size=CHUNK_BYTES):
                yield piece

    async def close(self) -> None:
        """Its connections belong to the library's pool."""

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise SourceChanged(
                f"{self.uri}: {what} is not there any more", advice="upload the version again", details={"file": what}
            ) from None
        except exceptions.PreconditionError:
            raise self._changed(what) from None
        except _NO_RIGHT:
            raise self._no_right(what) from None
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise SourceUnreadable(
                f"{self.uri}: {what} cannot be read: {_kind(error)}",
                advice="it is tried again; check the store's address and the network",
                details={"file": what},
            ) from None

    def _changed(self, name: str) -> SourceChanged:
        return SourceChanged(
            f"{self.uri}: {name} was overwritten after it was resolved",
            advice="write new versions to a new folder instead of overwriting one",
            details={"file": name},
        )

    def _no_right(self, what: str) -> SourceDenied:
        return SourceDenied(
            f"{self.uri}: {what} may not be read with these credentials",
            advice="check that they are not expired, and that they allow s3:GetObject (and s3:ListBucket) or the like",
            details={"file": what},
        )


def _stat(meta: Any) -> FileStat:
    return FileStat(size=meta["size"], revision=meta["e_tag"] or meta["version"] or "")


def _kind(error: BaseException) -> str:
    """Say what happened without what could hold a signed address."""
    text = str(error)
    for sign, meaning in (
        ("read timeout", "it sent nothing for too long"),
        ("timed out", "it took too long"),
        ("connect", "no connection"),
        ("dns", "its name is not known"),
        ("decoding response body", "it broke off"),
        ("503", "it answered 503"),
        ("429", "it answered 429"),
        ("500", "it answered 500"),
    ):
        if sign in text.lower():
            return meaning
    return type(error).__name__

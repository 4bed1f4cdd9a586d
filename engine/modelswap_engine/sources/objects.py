"""``s3://``, ``gs://``, ``az://``: folders in object stores, by obstore (ranges, signing, workload identity).

Knows nothing of checkpoints. What a store's client says of an error can hold signed addresses: only its kind is told.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import msgspec
import obstore
from obstore import exceptions
from obstore.store import from_url

from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.protocol.errors import (
    ModelswapError,
    SourceChanged,
    SourceDenied,
    SourceNotFound,
    SourceUnreadable,
)
from modelswap_engine.sources.credentials import CA, Credentials
from modelswap_engine.sources.remote.port import FileStat

SCHEMES: Final[Mapping[str, str]] = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
"""Scheme → how the names of its settings begin, in the environment as in mounted credentials."""
CHUNK_BYTES: Final = 4 << 20
_EXPIRED: Final = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestExpired")
"""Codes of S3's answers 400 to credentials whose time is over."""
_STATUS: Final = re.compile(r"status code: (\d{3})")
_MEANINGS: Final = (
    ("body error", "it broke off"),
    ("non-partial response", "the whole file came instead of a range"),
    ("requested", "another range came"),
    ("timed out", "it took too long"),
    ("error sending request", "no answer came"),
    ("dns", "its name is not known"),
)
"""What is said of a text that holds a sign, without what could hold a signed address."""
NO_RIGHT: Final = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


class ObjectSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient the client is: seconds, and how often it asks again before it says so (then the fetch is)."""

    connect: float = 10.0
    stall: float = 30.0
    whole: float = 600.0
    retries: int = 2


PATIENT: Final = ObjectSettings()


class ObjectStores:
    """Opens folders of buckets; see :class:`sources.remote.port.Opener`.

    Args:
        credentials: those that are mounted; the process's own (environment, workload identity) otherwise.
        settings: how patient to be.
    """

    def __init__(self, credentials: Credentials, *, settings: ObjectSettings = PATIENT) -> None:
        self._credentials = credentials
        self._options = {
            "connect_timeout": timedelta(seconds=settings.connect),
            "read_timeout": timedelta(seconds=settings.stall),
            "timeout": timedelta(seconds=settings.whole),
        }
        self._retry: Any = {"max_retries": settings.retries, "retry_timeout": timedelta(seconds=2 * settings.stall)}

    async def open(self, uri: str, *, credentials: str) -> "ObjectFolder":
        """Open a folder by its URI; nothing is asked yet."""
        values = await asyncio.to_thread(self._credentials.read, credentials)
        begins = SCHEMES[uri.partition(":")[0].lower()]
        config: Any = {key.lower(): value for key, value in values.items() if key.upper().startswith(begins)}
        options: Any = dict(self._options)
        # An option of the connection by its nature, a setting of the store by its name.
        plain = config.pop(f"{begins.lower()}allow_http", os.environ.get(f"{begins}ALLOW_HTTP", ""))
        if plain.lower() == "true":
            options["allow_http"] = True
        if CA in values:
            options["root_certificate"] = values[CA]
        try:
            store = from_url(uri, config=config, client_options=options, retry_config=self._retry)
        except (exceptions.BaseError, ValueError) as error:
            raise SourceDenied(
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
        self.store = store

    async def files(self, names: Iterable[str]) -> Mapping[str, FileStat]:
        """List the folder; where that is not allowed, ask for each file."""
        try:
            with self._telling("its list"):
                listed = await obstore.list_with_delimiter_async(self.store)
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
                    found[name] = _stat(await obstore.head_async(self.store, name))
            except SourceChanged:
                continue  # it is not there
            except SourceDenied:  # S3 answers so for a missing object to who may not list
                refused += 1
        if names and refused == len(names):
            raise self._no_right("it")
        return found

    async def stream(self, name: str, start: int, stop: int, *, stat: FileStat) -> AsyncIterator[bytes]:
        """Yield a range of an object, provided that it has the revision."""
        with self._telling(name):
            options: Any = {"range": (start, stop)} | ({"if_match": stat.revision} if stat.revision else {})
            result = await obstore.get_async(self.store, name, options=options)
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
            raise self._gone(what) from None
        except exceptions.PreconditionError:
            raise self._changed(what) from None
        except NO_RIGHT:
            raise self._no_right(what) from None
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise self._understood(what, str(error)) from None

    def _understood(self, what: str, text: str) -> ModelswapError:
        """Tell by a text what the type of the client's error does not."""
        if "precondition" in text.lower():  # between two parts of one body
            return self._changed(what)
        if means_denied(text):
            return self._no_right(what)
        if _status(text) == "404":
            return self._gone(what)
        return SourceUnreadable(
            f"{self.uri}: {what} cannot be read: {meaning(text)}",
            advice="it is tried again; check the store's address and the network",
            details={"file": what},
        )

    def _gone(self, what: str) -> SourceChanged:
        return SourceChanged(
            f"{self.uri}: {what} is not there any more", advice="upload the version again", details={"file": what}
        )

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
    tag = (meta["e_tag"] or "").strip('"')
    # In quotes everywhere: a list may leave out those that an answer and a condition have.
    return FileStat(size=meta["size"], revision=f'"{tag}"' if tag else meta["version"] or "")


def means_denied(text: str) -> bool:
    """Say whether an error's text, where its type does not, tells that the credentials do not suffice."""
    return _status(text) in {"401", "403"} or any(sign in text for sign in _EXPIRED)


def meaning(text: str) -> str:
    """Return what an error's text says, without what could hold a signed address."""
    if status := _status(text):
        return f"it answered {status}"
    return next((meaning for sign, meaning in _MEANINGS if sign in text.lower()), "the store's client failed")


def _status(text: str) -> str:
    found = _STATUS.search(text)
    return found[1] if found else ""

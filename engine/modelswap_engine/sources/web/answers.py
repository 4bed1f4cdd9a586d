"""What an answer is worth: the bytes that were asked for, of the revision that was asked for, or which error. Pure."""

import re
from dataclasses import dataclass, field
from typing import Final

from yarl import URL

from modelswap_engine.protocol.errors import ModelswapError, SourceChanged, SourceDenied, SourceUnreadable
from modelswap_engine.sources.remote.port import FileStat
from modelswap_engine.sources.web.authorization import Authorizer, Fixed
from modelswap_engine.sources.web.client import Answer
from modelswap_engine.sources.web.patience import Passing, retry_after

GONE: Final = frozenset({404, 410})
_DENIED: Final = frozenset({401, 403})
_LATER: Final = frozenset({408, 425, 429})
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One file on a server.

    Attributes:
        url: where it is.
        shown: its name in messages.
        host: the host that a person chose.
        authorizer: who we are there.
        tagged: its revision is what the server's answers say of it (ETag, Last-Modified); else it is in the URL.
    """

    url: URL
    shown: str
    host: str
    authorizer: Authorizer = field(default_factory=lambda: Fixed(""))
    tagged: bool = False


def wanted(target: Target, start: int, stop: int, *, stat: FileStat) -> dict[str, str]:
    """Return the headers that ask for a range of a file of that revision."""
    headers = {"Range": f"bytes={start}-{stop - 1}"}
    # A weak tag never matches If-Match; it is compared when the answer comes.
    if target.tagged and stat.revision.startswith('"'):
        headers["If-Match"] = stat.revision
    return headers


def check_part(answer: Answer, target: Target, start: int, stop: int, *, stat: FileStat, now: float) -> None:
    """Look at the head of an answer to a request for a range.

    Raises:
        SourceChanged: the file is not what it was.
        SourceUnreadable, SourceDenied, Passing: something else comes than was asked for.
    """
    if answer.status in GONE:
        raise _changed(target, "is not there any more")
    if answer.status == 412:
        raise _changed(target, "was overwritten after it was resolved")
    match = _CONTENT_RANGE.fullmatch(answer.header("Content-Range"))
    if answer.status == 416 or (answer.status == 206 and match is not None and int(match[3]) != stat.size):
        raise _changed(target, "has another size than when it was resolved")
    if answer.status != 206:
        raise trouble(answer, target, now=now)
    if match is None or (match[1], match[2]) != (str(start), str(stop - 1)):
        got = answer.header("Content-Range")[:60] or "no range"
        raise SourceUnreadable(f"{target.shown}: asked for bytes {start}-{stop - 1}, it sent {got!r}")
    if answer.header("Content-Encoding") not in {"", "identity"}:
        raise SourceUnreadable(f"{target.shown}: it came compressed", advice="let the server send it as it is")
    if target.tagged and stat.revision and revision_of(answer) != stat.revision:
        raise _changed(target, "was overwritten after it was resolved")


def whole_size(answer: Answer) -> int | None:
    """Return the size of a file by the answer to a request for its first byte; None: the answer does not say."""
    match = _CONTENT_RANGE.fullmatch(answer.header("Content-Range"))
    if answer.status in {206, 416} and match is not None:
        return int(match[3])
    return 0 if answer.status == 200 and answer.header("Content-Length") == "0" else None


def revision_of(answer: Answer) -> str:
    """Return what the answer says by which a change would show; "" where it says nothing."""
    return answer.header("ETag") or answer.header("Last-Modified")


def trouble(answer: Answer, target: Target, *, now: float) -> ModelswapError | Passing:
    """Return the error that an answer of another status than was hoped for is."""
    status = answer.status
    if status in _DENIED:
        denied = SourceDenied(
            f"{target.shown} may not be read with these credentials (status {status})",
            advice="check the Secret that credentialsRef names: that it is of this server, and not expired",
        )
        # What a server sent us to may be a signed address whose time is over: there is a new one.
        return Passing(denied) if answer.redirected else denied
    if status in {200, 206, 416}:
        advice = "let the server answer requests for ranges (status 206, Content-Range)"
        return SourceUnreadable(f"{target.shown}: it does not serve ranges (status {status})", advice=advice)
    error = SourceUnreadable(f"{target.shown}: it answered {status}", advice="look at the server")
    if status in _LATER or status >= 500:
        return Passing(error, after=retry_after(answer.header("Retry-After"), now=now))
    return error


def _changed(target: Target, what: str) -> SourceChanged:
    return SourceChanged(
        f"{target.shown} {what}", advice="write new versions to a new folder instead of overwriting one"
    )

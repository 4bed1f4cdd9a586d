"""The table of faults: what each kind of place makes of what goes wrong between a real server and the engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from modelswap_engine.protocol.errors import (
    ModelswapError,
    SourceChanged,
    SourceDenied,
    SourceNotAllowed,
    SourceUnreadable,
)
from modelswap_engine.sources.remote.port import FileStat, Folder
from tests.support.servers.faults import (
    Answer,
    Dripping,
    Fault,
    OtherTag,
    Reset,
    Stalled,
    Truncated,
    WholeBody,
    WrongRange,
    forbidden,
    redirected,
    throttled,
)
from tests.support.servers.places import HubPlace, Place, RegistryPlace, WebPlace

pytestmark = pytest.mark.sources

NAME = "model.safetensors"
CONTENT = bytes(range(256)) * 4096
START, STOP = 1000, 700_000
OTHER = CONTENT[::-1]


async def streamed(folder: Folder, stat: FileStat, start: int = START, stop: int = STOP) -> bytes:
    return b"".join([bytes(piece) async for piece in folder.stream(NAME, start, stop, stat=stat)])


@contextlib.asynccontextmanager
async def opened(place: Place) -> AsyncIterator[Folder]:
    folder = await place.open()
    try:
        yield folder
    finally:
        await folder.close()


@contextlib.asynccontextmanager
async def found(place: Place, content: bytes = CONTENT) -> AsyncIterator[tuple[Folder, FileStat]]:
    """Upload a file and look at it, before something goes wrong."""
    await place.upload({NAME: content})
    async with opened(place) as folder:
        stat = (await folder.files([NAME]))[NAME]
        place.proxy.forget()
        yield folder, stat


async def test_only_what_is_asked_for_travels(place: Place) -> None:
    await place.upload({NAME: CONTENT, "config.json": b"{}"})
    async with opened(place) as folder:
        files = await folder.files([NAME, "config.json", "manifest.json"])
        assert {name: stat.size for name, stat in files.items()} == {NAME: len(CONTENT), "config.json": 2}
        assert all(stat.revision for stat in files.values())
        place.proxy.forget()
        assert await streamed(folder, files[NAME]) == CONTENT[START:STOP]
    assert place.proxy.sent() == STOP - START
    assert not place.pauses


PASSING: dict[str, Fault] = {
    "truncated": Truncated(after=100_000),
    "reset half way": Reset(after=100_000),
    "reset at once": Reset(),
    "stalled half way": Stalled(after=100_000),
    "stalled at once": Stalled(),
    "in drips": Dripping(piece=100_000, seconds=0.01),
    "too many requests": throttled(429, retry_after="7"),
    "unavailable": throttled(503, retry_after="Mon, 01 Jan 2001 00:00:00 GMT"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
async def test_what_passes_is_asked_again_from_where_it_was_on(place: Place, fault: Fault) -> None:
    async with found(place) as (folder, stat):
        place.proxy.inject(fault, times=1)
        assert await streamed(folder, stat) == CONTENT[START:STOP]
    first, *again = place.proxy.asked()
    assert first.range == f"bytes={START}-{STOP - 1}"
    if isinstance(fault, Dripping):
        assert not again
        return
    went_on = int(again[0].range.removeprefix("bytes=").removesuffix(f"-{STOP - 1}"))
    after = max(getattr(fault, "after", 0), 0)
    # A reset takes along what the client had not read yet.
    assert went_on == START + after or (isinstance(fault, Reset) and START <= went_on < START + after)
    pauses = [7.0 if fault == throttled(429, retry_after="7") else 0.25]
    # Of a connection that was kept, a reset before any answer says nothing: the client tries a new one by itself.
    assert place.pauses == pauses or (fault == Reset() and not place.pauses)


LASTING: dict[str, tuple[Fault, type[ModelswapError], str]] = {
    "reset": (Reset(), SourceUnreadable, "connection was lost|closed the connection"),
    "stalled": (Stalled(), SourceUnreadable, "sent nothing for too long"),
    "unavailable": (throttled(503), SourceUnreadable, "answered 503"),
    "for an hour": (throttled(429, retry_after="3600"), SourceUnreadable, "answered 429"),
    "wrong range": (WrongRange(), SourceUnreadable, "asked for bytes 1000-699999, it sent 'bytes 1001-700000"),
    "range ignored": (WholeBody(), SourceUnreadable, "does not serve ranges"),
    "replaced": (Answer(412), SourceChanged, "overwritten"),
    "gone": (Answer(404), SourceChanged, "not there any more"),
    "shorter": (Answer(416, {"Content-Range": "bytes */9"}), SourceChanged, "another size"),
    "forbidden": (forbidden(), SourceDenied, "status 403"),
    "to the metadata service": (
        redirected("https://169.254.169.254/latest/meta-data/?token=secret"),
        SourceNotAllowed,
        "link-local address 169.254.169.254",
    ),
    "to itself for ever": (redirected("?again"), SourceUnreadable, "more than 5 redirects"),
    "to nowhere": (Answer(302), SourceUnreadable, "redirect to nowhere"),
}


@pytest.mark.parametrize(("fault", "error", "text"), LASTING.values(), ids=LASTING)
async def test_what_lasts_is_an_error(place: Place, fault: Fault, error: type[ModelswapError], text: str) -> None:
    async with found(place) as (folder, stat):
        place.proxy.inject(fault)
        with pytest.raises(error, match=text) as caught:
            await streamed(folder, stat)
    assert place.pauses in ([], [0.25, 0.5, 1.0])
    told = f"{caught.value} {caught.value.advice} {caught.value.details}"
    assert not [word for word in ("not-a-secret", "token=secret", "Signature") if word in told]


async def test_other_bytes_under_the_right_range_are_for_the_hashes_to_find(place: Place) -> None:
    async with found(place) as (folder, stat):
        place.proxy.inject(WrongRange(admitted=False))
        assert await streamed(folder, stat) == bytes(255 - value for value in CONTENT[START:STOP])


async def test_who_gets_on_is_not_given_up(place: Place) -> None:
    async with found(place) as (folder, stat):
        place.proxy.inject(Truncated(after=100_000))
        assert await streamed(folder, stat) == CONTENT[START:STOP]
    assert place.pauses == [0.25] * 6


async def test_a_file_that_is_overwritten_half_way(web_place: WebPlace) -> None:
    async with found(web_place) as (folder, stat):
        assert await streamed(folder, stat, 0, 10) == CONTENT[:10]
        assert web_place.proxy.seen[-1].headers["If-Match"] == stat.revision
        web_place.proxy.inject(OtherTag(), times=1)  # a cache before it that looks at no conditions
        with pytest.raises(SourceChanged, match="overwritten"):
            await streamed(folder, stat, 10, 20)
        await web_place.upload({NAME: OTHER})
        with pytest.raises(SourceChanged, match="overwritten"):
            await streamed(folder, stat, 10, 20)


async def test_a_branch_that_moves_half_way(hub_place: HubPlace) -> None:
    async with found(hub_place) as (folder, stat):
        await hub_place.upload({NAME: OTHER})
        assert await streamed(folder, stat, 0, 10) == CONTENT[:10]
        async with found(hub_place, OTHER) as (later, _):
            with pytest.raises(SourceChanged, match="another file"):
                await streamed(later, stat, 10, 20)


async def test_a_tag_that_moves_half_way(registry_place: RegistryPlace) -> None:
    async with found(registry_place) as (folder, stat), found(registry_place, OTHER) as (later, other):
        assert (later.uri, other) != (folder.uri, stat)
        assert await streamed(later, stat, 0, 10) == CONTENT[:10]
        assert await streamed(later, other, 0, 10) == OTHER[:10]

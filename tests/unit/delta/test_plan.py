"""Which way to a tensor is taken; that it is the cheapest of all is a property (``tests/property/test_delta.py``)."""

import hashlib

from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.delta.layout import Header, PackedTensor, Version
from modelswap_engine.delta.plan import plan

A, B, C = (hashlib.sha256(name).hexdigest() for name in (b"a", b"b", b"c"))
SOME = Version(digest=f"sha256:{A}", bytes=100)


def wanted(sha256: str, *, name: str = "t") -> TensorEntry:
    return TensorEntry(name=name, dtype="U8", shape=(100,), nbytes=100, file="f", offset=0, sha256=sha256)


def pack(base: str, target: str, size: int) -> Header:
    entry = PackedTensor(
        name="t", dtype="U8", shape=(100,), nbytes=100, sha256=target, base=base, offset=0, size=size
    )  # fmt: skip
    return Header(base=SOME, target=SOME, tensors=(entry,))


def test_what_is_held_under_any_name_costs_nothing() -> None:
    routes = plan([wanted(A, name="x"), wanted(A, name="y")], held={A}, packs={"p": pack(B, A, 1)})
    assert list(routes) == [A]
    assert routes[A].held
    assert (routes[A].cost, routes[A].links) == (0, ())


def test_without_a_pack_that_helps_it_travels_as_it_is() -> None:
    for packs in ({}, {"other": pack(A, B, 1)}, {"base is not here": pack(B, C, 1)}, {"too large": pack(A, C, 100)}):
        route = plan([wanted(C)], held={A}, packs=packs)[C]
        assert (route.cost, route.held, route.links) == (100, False, ())


def test_a_chain_goes_through_the_smaller_of_two_packs_for_the_same_step() -> None:
    packs = {"large": pack(B, C, 50), "small": pack(B, C, 20), "first": pack(A, B, 10)}
    route = plan([wanted(C)], held={A}, packs=packs)[C]
    assert (route.cost, [link.pack for link in route.links]) == (30, ["first", "small"])


def test_a_chain_may_begin_with_what_is_made_from_nothing() -> None:
    packs = {"whole": pack("", B, 40), "step": pack(B, C, 20)}
    route = plan([wanted(C)], held=(), packs=packs)[C]
    assert (route.cost, [link.pack for link in route.links]) == (60, ["whole", "step"])
    assert plan([wanted(C)], held=(), packs=packs, most_steps=1)[C].links == ()


def test_a_circle_ends() -> None:
    packs = {"there": pack(A, B, 1), "back": pack(B, A, 1)}
    assert plan([wanted(B)], held=(), packs=packs, most_steps=50)[B].cost == 100

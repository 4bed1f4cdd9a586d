"""Where the other pods are: behind names, and never this pod itself."""

import socket
import threading

import pytest

from modelswap_engine.sources.peers import finding
from modelswap_engine.sources.peers.choice import Peer
from modelswap_engine.sources.peers.finding import find


async def test_this_pod_is_left_out_and_others_at_its_port_are_not() -> None:
    names = [Peer("127.0.0.1", 8001), Peer("127.0.0.1", 8002), Peer("127.0.0.2", 8001)]
    assert await find(names, own_port=8001) == [Peer("127.0.0.1", 8002), Peer("127.0.0.2", 8001)]


async def test_a_name_has_all_its_addresses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host != "chat-peers":
            raise socket.gaierror("no such name")
        found = [("10.0.0.1", port), ("fd00::1", port, 0, 0), ("10.0.0.1", port)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    names = [Peer("chat-peers", 8001), Peer("gone", 8001)]
    assert await find(names, own_port=9) == [Peer("10.0.0.1", 8001), Peer("fd00::1", 8001)]
    assert await find(names[1:], own_port=9) == []


async def test_names_that_are_not_resolved_in_time_are_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def slowly(*_: object, **__: object) -> list[object]:
        assert answered.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    monkeypatch.setattr(finding, "FIND_SECONDS", 0.05)
    try:
        assert await find([Peer("chat-peers", 8001)], own_port=9) == []
    finally:
        answered.set()

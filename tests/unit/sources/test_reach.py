"""Which addresses a pod may be sent to, whatever they are written like and whenever a name changes."""

import contextlib
import socket

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from modelswap_engine.protocol.errors import SourceNotAllowed
from modelswap_engine.sources.web.reach import CheckedResolver, Reach

PUBLIC = ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"]
LINK_LOCAL = ["169.254.169.254", "fe80::1", "fe80::1%eth0", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"]
LOOPBACK = ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"]
PRIVATE = ["10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "0.0.0.0", "224.0.0.1"]
PRIVATE6 = ["::", "fd00:ec2::254", "ff02::1", "2002:a00:1::"]


def refused(reach: Reach, address: str, *, chosen: bool) -> bool:
    with contextlib.suppress(SourceNotAllowed):
        reach.check(address, host="host.example", chosen=chosen)
        return False
    return True


@pytest.mark.parametrize("address", [*PUBLIC, *LINK_LOCAL, *LOOPBACK, *PRIVATE, *PRIVATE6])
def test_a_server_may_send_to_public_addresses_and_a_person_to_all_but_link_local(address: str) -> None:
    assert refused(Reach(), address, chosen=False) is (address not in PUBLIC)
    assert refused(Reach(), address, chosen=True) is (address in LINK_LOCAL)
    assert not refused(Reach(anywhere=True), address, chosen=False)


def test_hosts_of_allowed_prefixes() -> None:
    prefixes = ["https://Models.corp/chat", "oci://registry.corp:5000/org", "hf://org/model", "s3://bucket/chat"]
    assert Reach.of(prefixes, anywhere=False) == Reach(frozenset({"models.corp", "registry.corp"}))


class Names(AbstractResolver):
    """A name that leads elsewhere each time it is asked for."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)
            for address in self._answers.pop(0)
        ]

    async def close(self) -> None:
        pass


async def test_what_is_connected_to_is_what_was_looked_at() -> None:
    resolver = CheckedResolver(Names([PUBLIC[0]], ["169.254.169.254"], [PUBLIC[0], "10.0.0.1"]), Reach(), chosen=False)
    assert [found["host"] for found in await resolver.resolve("rebound.example")] == [PUBLIC[0]]
    for kind in ("link-local", "private"):
        with pytest.raises(SourceNotAllowed, match=f"rebound.example leads to {kind} address"):
            await resolver.resolve("rebound.example")

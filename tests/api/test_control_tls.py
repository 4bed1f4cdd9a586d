"""The operator's process against pods whose control ports speak TLS, beside one that does not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme

from modelswap_engine.http.tls import Certificate
from tests.api.conftest import CONTENTS
from tests.support.apiserver import ApiServer
from tests.support.fake_pods import Slot, eventually, ref
from tests.support.operated import OperatorProcess, granted
from tests.support.pki import put, write_pair
from tests.support.rest import Rest

pytestmark = pytest.mark.api

NAMESPACE = "operated-tls"
NAME = f"modelswap-control.{NAMESPACE}.svc"
V10, V11, V12 = ref("1.0", "a"), ref("1.1", "b"), ref("1.2", "c")


class Secured:
    """An operator that requires TLS, the authority that it believes, and pods with certificates of it."""

    def __init__(self, operator: OperatorProcess, folder: Path) -> None:
        self.operator = operator
        self.authorities, self._folder = folder / "ca.crt", folder
        self.authority = trustme.CA()
        put(self.authorities, self.authority.cert_pem.bytes())

    def certificate(self, name: str = NAME) -> Certificate:
        files = write_pair(self.authority, self._folder / "pod", name)
        return Certificate(certificate=files.certificate, key=files.key)


@pytest.fixture(scope="module")
def secured(definitions: ApiServer, rest: Rest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    home = tmp_path_factory.mktemp("secured")
    process = OperatorProcess(definitions, home, account=granted(definitions, rest, home, namespace=NAMESPACE))
    found = Secured(process, home)
    process.start("--control-tls=required", f"--control-ca-file={found.authorities}")
    process.wait_ready()
    yield found
    process.stop()


@pytest.fixture
async def slot(secured: Secured, rest: Rest, request: pytest.FixtureRequest) -> AsyncIterator[Slot]:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:40].rstrip("-")
    found = Slot(rest, namespace=NAMESPACE, name=name, contents=dict(CONTENTS))
    yield found
    await found.remove()


async def test_versions_and_authorities_change_over_tls(slot: Slot, secured: Secured) -> None:
    pods = [await slot.add_pod(V10, tls=(certificate := secured.certificate()).context) for _ in range(2)]
    slot.create(V10)
    await slot.ready_at(V10)
    slot.bump(V11)
    await slot.ready_at(V11)
    # Every certificate is replaced by one of another authority, under a running operator and running pods.
    secured.authority = trustme.CA()
    put(secured.authorities, secured.authority.cert_pem.bytes())
    renewed = await slot.add_pod(V11, tls=secured.certificate().context)
    secured.certificate()
    assert certificate.look()
    slot.delete_pod(pods[0])  # its own certificate is of the old authority for good
    slot.bump(V12)
    await slot.ready_at(V12)
    assert renewed.sidecar.live == V12
    assert "Traceback" not in secured.operator.log()


async def test_a_plain_pod_is_not_spoken_to_where_tls_is_required(slot: Slot, secured: Secured) -> None:
    await slot.add_pod(V10, tls=secured.certificate().context)
    plain = await slot.add_pod(V10)
    slot.create(V10)
    await eventually(lambda: "requires TLS" in str(slot.object().get("status")), what=slot.story)
    assert slot.condition("Ready") != ("True", "Succeeded")
    assert plain.sidecar.calls == []
    slot.delete_pod(plain)
    await slot.ready_at(V10)


async def test_a_pod_with_a_certificate_of_another_namespace_is_told_by_name(slot: Slot, secured: Secured) -> None:
    stranger = await slot.add_pod(V10, tls=secured.certificate("modelswap-control.elsewhere.svc").context)
    slot.create(V10)
    await eventually(lambda: "did not prove that it is" in str(slot.object().get("status")), what=slot.story)
    assert slot.condition("Ready") == ("Unknown", "EngineTlsRefused")
    assert stranger.sidecar.calls == []

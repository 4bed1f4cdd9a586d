"""The certificate that the engine's chart asks for: made and renewed by cert-manager's own controllers, under a running
engine and a running operator, neither of which is started again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.apiserver import ApiServer
from tests.support.cache import REPOSITORY
from tests.support.cert_manager import NAMESPACE as AUTHORITIES
from tests.support.cert_manager import Certificates, cert_manager
from tests.support.certified import SERVER_NAME, Certified
from tests.support.fake_pods import eventually
from tests.support.rest import Rest

pytestmark = [pytest.mark.api, pytest.mark.full, pytest.mark.timeout(600)]

CA = "modelswap-ca"


@pytest.fixture(scope="module")
def authorities(definitions: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Certificates]:
    """The authority of `examples/control-tls.yaml`."""
    with cert_manager(definitions, tmp_path_factory.mktemp("cert-manager")):
        definitions.kubectl("apply", "-f", str(REPOSITORY / "examples/control-tls.yaml"))
        found = Certificates(definitions, AUTHORITIES)
        found.wait_issued(CA, generation=1)
        yield found


@pytest.fixture(scope="module")
def certified(
    authorities: Certificates, definitions: ApiServer, rest: Rest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Certified]:
    from tests.support.models import disjoint_pair  # brings torch, which fast tests do not want

    home = tmp_path_factory.mktemp("certified")
    disjoint_pair(home / "models")
    found = Certified(definitions, rest, home, models=home / "models")
    found.tell(authorities.secret(CA)["ca.crt"])
    found.certificates.apply(found.certificate())
    found.bring()
    found.start()
    found.slot.create(found.versions[0])
    yield found
    found.stop()


@pytest.fixture
async def running(certified: Certified, authorities: Certificates) -> Certified:
    """Both at work, with an authority that both know."""
    await eventually(lambda: certified.engine.serves(certified.ca_file), what=certified.engine.child.tail)
    return certified


async def test_the_charts_certificate_proves_the_pods_name(running: Certified) -> None:
    shown = running.engine.shown()
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [SERVER_NAME]
    assert isinstance(shown.public_key(), ec.EllipticCurvePublicKey)
    await running.changes()


async def test_a_secret_that_was_deleted_is_made_again_and_taken_up(running: Certified) -> None:
    before, boot = running.engine.shown(), running.engine.state(running.ca_file).boot_id
    async with running.another():
        running.certificates.delete_secret(running.name)
    assert running.engine.shown().public_key() != before.public_key()
    await running.changes()
    assert running.engine.state(running.ca_file).boot_id == boot


async def test_renewals_by_time_go_on_under_versions_that_change(running: Certified) -> None:
    """Times that cert-manager's own rules allow: an hour at least, and here renewed 15 s after it was made."""
    async with running.another():
        running.certificates.apply(running.certificate(duration="1h", renewBefore="59m45s"))
    for _ in range(2):
        async with running.another():
            await running.changes()
    running.certificates.apply(running.certificate())


async def test_the_authoritys_own_renewal_needs_nothing_because_its_key_stays(
    running: Certified, authorities: Certificates
) -> None:
    before = authorities.secret(CA)
    authorities.renew(CA)
    await eventually(lambda: authorities.secret(CA)["tls.crt"] != before["tls.crt"])
    assert authorities.secret(CA)["tls.key"] == before["tls.key"]
    async with running.another():
        running.certificates.renew(running.name)
    assert running.certificates.secret(running.name)["ca.crt"] == authorities.secret(CA)["ca.crt"] != before["ca.crt"]
    await running.changes()
    await running.believe(authorities.secret(CA)["ca.crt"])
    await running.changes()


async def test_a_certificate_of_another_authority_is_refused_until_the_operator_knows_it(
    running: Certified, authorities: Certificates
) -> None:
    before, live = authorities.secret(CA), running.engine.state(running.ca_file).live
    authorities.delete_secret(CA)
    await eventually(lambda: authorities.secret(CA).get("tls.key", before["tls.key"]) != before["tls.key"])
    async with running.another():
        running.certificates.renew(running.name)
    after = authorities.secret(CA)["ca.crt"]
    await eventually(
        lambda: running.slot.condition("Ready") == ("Unknown", "EngineTlsRefused"), what=running.slot.story
    )
    assert "unable to get local issuer certificate" in running.slot.message()
    await running.believe(before["ca.crt"], after)
    await running.slot.ready_at(running.versions[0])
    assert running.engine.state(running.ca_file).live == live
    await running.changes()
    await running.believe(after)
    await running.changes()

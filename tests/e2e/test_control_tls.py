"""TLS on the control port, on a real cluster: versions change by it, and who does not prove its name is not told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.support.cluster.provider import Cluster
from tests.support.gitops_steps import digest_of, identity
from tests.support.operator_release import OPERATOR_NAMESPACE, install_operator
from tests.support.pki import write_pair
from tests.support.stack import Slot, embedded_values

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]

_NAME = "encrypted"
_SECRET = "control-tls"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def present(cluster: Cluster, authority: trustme.CA, folder: Path, name: str) -> None:
    """Have the pods show a certificate for a name."""
    files = write_pair(authority, folder, name)
    secret = ("-n", _NAME, "create", "secret", "tls", _SECRET, f"--cert={files.certificate}", f"--key={files.key}")
    cluster.kubectl("apply", "-f", "-", stdin=cluster.kubectl(*secret, "--dry-run=client", "-o", "json"))


@pytest.fixture
def encrypted(cluster: Cluster, models: Path, authority: trustme.CA, tmp_path: Path) -> Iterator[Slot]:
    """A pod whose control port speaks TLS, and an operator that speaks nothing else."""
    ca = tmp_path / "ca.crt"
    authority.cert_pem.write_to_path(ca)
    cluster.kubectl("-n", OPERATOR_NAMESPACE, "create", "configmap", "control-ca", f"--from-file={ca}")
    install_operator(cluster, "controlTls.mode=Required", "controlTls.ca.configMap=control-ca")
    cluster.kubectl("create", "namespace", _NAME)
    present(cluster, authority, tmp_path, f"modelswap-control.{_NAME}.svc")
    slot = Slot(cluster, name=_NAME, models=models)
    tls = {"controlTls": {"enabled": True, "secretName": _SECRET}}
    slot.install(replicas=1, model="v1", version="1.0", engine=embedded_values({}) | tls)
    yield slot
    slot.uninstall(wait=False)
    install_operator(cluster)
    cluster.kubectl("-n", OPERATOR_NAMESPACE, "delete", "configmap", "control-ca")


def test_versions_change_by_tls_and_only_where_the_name_is_proved(
    encrypted: Slot, authority: trustme.CA, tmp_path: Path
) -> None:
    before = identity(encrypted.pods())
    encrypted.wait_ready(encrypted.apply("1.1", "v2"))
    assert encrypted.get()["status"]["versions"][0]["digest"] == digest_of(encrypted, "v2")

    present(encrypted.cluster, authority, tmp_path, "modelswap-control.other.svc")
    with encrypted.watch() as objects:
        assert any("EngineTlsRefused" in json.dumps(found.get("status", {})) for found in objects)
    generation = encrypted.apply("1.2", "v3")
    present(encrypted.cluster, authority, tmp_path, f"modelswap-control.{_NAME}.svc")
    encrypted.wait_ready(generation)
    assert encrypted.get()["status"]["versions"][0]["digest"] == digest_of(encrypted, "v3")
    assert identity(encrypted.pods()) == before

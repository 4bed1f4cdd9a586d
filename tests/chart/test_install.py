"""Installing, upgrading and removing the operator's chart with Helm: what stays and what goes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.apiserver import ApiServer
from tests.support.charts import CHARTS, run_helm
from tests.support.custom import DEFINITIONS, install_definitions, model_version

pytestmark = pytest.mark.api
CHART = str(CHARTS / "modelswap")


class Release:
    """The operator's release on one server; nothing runs there, so nothing is waited for."""

    def __init__(self, server: ApiServer, home: Path) -> None:
        self._server = server
        self._home = home

    def helm(self, *arguments: str) -> str:
        """Run Helm; return what it says."""
        done = self.try_helm(*arguments)
        assert done[0] == 0, done[1]
        return done[1]

    def try_helm(self, *arguments: str) -> tuple[int, str]:
        """Run Helm; return its status and what it says."""
        where = ("--namespace", "modelswap-system")
        done = run_helm(*arguments, *where, home=self._home, kubeconfig=self._server.kubeconfig)
        return done.returncode, done.stdout + done.stderr

    def definitions(self) -> set[str]:
        """Return the names of our definitions that are there."""
        names = self._server.kubectl("get", "crd", "-o", "jsonpath={.items[*].metadata.name}").split()
        return set(names) & set(DEFINITIONS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server of this module's own: definitions come and go here."""
    with ApiServer(tmp_path_factory.mktemp("install")) as server:
        yield server


@pytest.fixture
def release(server: ApiServer, tmp_path: Path) -> Iterator[Release]:
    release = Release(server, tmp_path)
    yield release
    release.try_helm("uninstall", "modelswap")
    server.kubectl("delete", "crd", *DEFINITIONS, "--ignore-not-found")


def test_install_upgrade_uninstall_and_install_again(release: Release, server: ApiServer) -> None:
    said = release.helm("install", "modelswap", CHART, "--create-namespace")
    assert "operator.serviceAccount: modelswap" in said
    assert release.definitions() == set(DEFINITIONS)
    release.helm("upgrade", "modelswap", CHART, "--set", "logging.level=debug")
    server.kubectl("wait", "--for=condition=Established", *(f"crd/{name}" for name in DEFINITIONS))
    server.kubectl("apply", "-f", "-", stdin=json.dumps(model_version()))
    release.helm("uninstall", "modelswap")
    assert release.definitions() == set(DEFINITIONS)
    assert server.kubectl("get", "modelversion", "slot", "-o", "name") == "modelversion.modelswap.dev/slot\n"
    assert server.kubectl("get", "deployments,clusterroles", "-A", "-l", "helm.sh/chart", "-o", "name") == ""
    release.helm("install", "modelswap", CHART)


def test_uninstall_takes_the_definitions_along_when_told_to(release: Release, server: ApiServer) -> None:
    release.helm("install", "modelswap", CHART, "--create-namespace", "--set", "crds.keep=false")
    release.helm("uninstall", "modelswap")
    # A definition is gone only when the server has removed its last object.
    server.kubectl("wait", "--for=delete", "--timeout=60s", *(f"crd/{name}" for name in DEFINITIONS))
    assert release.definitions() == set()


def test_definitions_applied_by_hand_are_adopted_on_request(release: Release, server: ApiServer) -> None:
    install_definitions(server)
    status, said = release.try_helm("install", "modelswap", CHART, "--create-namespace")
    assert status != 0
    assert "cannot be imported into the current release" in said
    release.helm("install", "modelswap", CHART, "--create-namespace", "--take-ownership")

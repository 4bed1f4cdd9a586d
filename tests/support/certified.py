"""An engine and an operator with what the charts say of TLS on the control port, and folders in place of mounts.

The Secret and the authorities are brought to those folders when a test says so, where a node would have its kubelet.
The engine is one process of this machine that asks nobody for tokens; the pod that leads to it exists at the API server
only.
"""

from __future__ import annotations

import contextlib
import itertools
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from cryptography import x509

from modelswap_engine.cli.client import ControlClient, Trust
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import Unavailable
from modelswap_engine.protocol.messages import VersionRef
from tests.support.apiserver import ApiServer
from tests.support.cert_manager import Certificates, Volume
from tests.support.charts import CHARTS, Charts, Object, one, pod_templates
from tests.support.fake_pods import Slot, eventually
from tests.support.free_ports import free_port
from tests.support.operated import OperatorProcess, granted
from tests.support.processes import Child
from tests.support.rest import Rest
from tests.support.serve import SMALL, STRICT, environment

NAMESPACE, NAME = "certified", "chat"
SERVER_NAME = f"modelswap-control.{NAMESPACE}.svc"
_VALUES = CHARTS / "modelswap-engine" / "ci" / "control-tls-values.yaml"
_READ_AGAIN = "the authorities of control ports have changed"
_OPERATOR_VALUES = {"controlTls": {"mode": "Required", "ca": {"configMap": "control-ca"}}}


class CertifiedEngine:
    """The embedded engine of a pod, with the control port's options as the chart writes them."""

    def __init__(self, folder: Path, models: Path, *, pod: str, port: int, options: list[str]) -> None:
        self._port = port
        variables = environment(MODELSWAP_POD_UID=pod)
        wanted = ("PYTHONPATH", "OMP_NUM_THREADS", "MODELSWAP_POD_UID")
        command = [
            *("env", *(f"{name}={variables[name]}" for name in wanted)),
            *(sys.executable, "-m", STRICT, "serve", *SMALL, "--insecure", *options),
            *("--model", str(models / "v1"), "--version", "1.0", "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(free_port()), "--control-port", str(port)),
            *("--state-dir", str(folder / "state"), "--allow-root", str(models)),
        ]
        self.child = Child("engine", command, log=folder / "engine.log")

    def state(self, authorities: Path) -> EngineState:
        """Ask as `modelswap state` does, believing these authorities.

        Raises:
            Unavailable: it does not answer, or did not prove its name.
        """
        trust = Trust(ca_file=authorities, server_name=SERVER_NAME)
        return ControlClient(f"https://127.0.0.1:{self._port}", token=None, trust=trust).get("/state", EngineState)

    def serves(self, authorities: Path) -> bool:
        self.child.check()
        try:
            return self.state(authorities).live is not None
        except Unavailable:
            return False

    def shown(self) -> x509.Certificate:
        """Return the certificate that the control port shows to new connections."""
        return x509.load_pem_x509_certificate(ssl.get_server_certificate(("127.0.0.1", self._port)).encode())


class Certified:
    """One slot of one pod, its operator, and what certificates both have."""

    engine: CertifiedEngine
    _told: tuple[bytes, ...]

    def __init__(self, server: ApiServer, rest: Rest, home: Path, *, models: Path) -> None:
        self._home, self._models, self._charts = home, models, Charts(home)
        self._tls, self._authorities = Volume(home / "tls"), Volume(home / "ca")
        self._numbers, self._told = itertools.count(1), ()
        self.operator = OperatorProcess(server, home, account=granted(server, rest, home, namespace=NAMESPACE))
        self.slot = Slot(rest, namespace=NAMESPACE, name=NAME, contents={})
        self.certificates = Certificates(server, NAMESPACE)
        self.name = str(self.certificate()["metadata"]["name"])
        self.ca_file = self._authorities.folder / "ca.crt"
        self.versions = [VersionRef(version=f"1.{n}", uri=(models / f"v{n + 1}").as_uri(), digest="") for n in range(2)]

    def certificate(self, **spec: Any) -> Object:
        """Return the Certificate of the chart, with fields of its spec changed."""
        thing = one(self._rendered(), "Certificate")
        return {**thing, "spec": {**thing["spec"], **spec}}

    def tell(self, *authorities: bytes) -> None:
        """Have the operator's ConfigMap hold these authorities, in a file that is like none before."""
        self._told = authorities
        self._authorities.bring({"ca.crt": b"".join([*authorities, f"# {next(self._numbers)}\n".encode()])})

    async def believe(self, *authorities: bytes) -> None:
        """Tell the operator, and wait until it goes by that: its connections are new from then on."""
        read = self.operator.log().count(_READ_AGAIN)
        self.tell(*authorities)
        await eventually(lambda: self.operator.log().count(_READ_AGAIN) > read, what=self.operator.log)

    def bring(self) -> None:
        """Bring the engine its Secret, as far as the chart mounts it."""
        volumes = next(pod_templates(self._rendered()))["spec"]["volumes"]
        mounted = next(volume["secret"] for volume in volumes if volume["name"] == "control-tls")
        secret = self.certificates.secret(mounted["secretName"])
        self._tls.bring({item["path"]: secret[item["key"]] for item in mounted["items"]})

    @contextlib.asynccontextmanager
    async def another(self) -> AsyncIterator[None]:
        """What is done meanwhile leads to another certificate: have it shown, and the operator's connections be new."""
        shown, revision = self.engine.shown(), self.certificates.revision(self.name)
        yield
        await eventually(lambda: self.certificates.revision(self.name) > revision)
        self.bring()
        await eventually(lambda: self.engine.shown() != shown, what=self.engine.child.tail)
        await self.believe(*self._told)

    def start(self) -> None:
        """Start operator and engine with the options of their charts."""
        operator = next(pod_templates(self._charts.template("modelswap", _OPERATOR_VALUES)))
        self.operator.start(*_options(operator, "/etc/modelswap/control-ca", self._authorities))
        options = _options(next(pod_templates(self._rendered())), "/etc/modelswap/tls", self._tls)
        port = free_port()
        pod = self.slot.make_pod(f"{NAME}-1", port=port, tls=True)
        self.engine = CertifiedEngine(self._home, self._models, pod=pod, port=port, options=options)
        self.slot.set_ready(f"{NAME}-1", True)

    def stop(self) -> None:
        self.operator.stop()
        self.engine.child.stop()

    async def changes(self) -> None:
        """Change the version to the other one."""
        live = self.engine.state(self.ca_file).live
        assert live is not None
        (other,) = [version for version in self.versions if version.version != live.version]
        self.slot.bump(other)
        await self.slot.ready_at(other)
        live = self.engine.state(self.ca_file).live
        assert live is not None
        assert live.version == other.version

    def _rendered(self) -> list[Object]:
        return self._charts.template("modelswap-engine", _VALUES, release=NAME, namespace=NAMESPACE)


def _options(template: Object, mount: str, volume: Volume) -> list[str]:
    """Return what a container's arguments say of TLS, with a folder of this machine in place of the mount."""
    (container,) = template["spec"]["containers"]
    prefixes = ("--control-tls", "--control-ca", "--control-server")
    return [item.replace(mount, str(volume.folder)) for item in container["args"] if item.startswith(prefixes)]

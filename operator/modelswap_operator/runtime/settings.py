"""What the process is told: flags by the chart, names by the downward API."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelswap_operator.effects.trust import SERVER_NAME, ControlTls


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All of it. ``namespaces`` empty means all; times are in seconds."""

    namespaces: tuple[str, ...] = ()
    log_format: str = "json"
    log_level: str = "info"
    http_host: str = "0.0.0.0"  # noqa: S104 - probes and scrapers come from outside the pod
    http_port: int = 8080
    control_port: int = 8001
    control_tls: ControlTls = ControlTls.DISABLED
    control_ca_file: Path | None = None
    control_server_name: str = SERVER_NAME
    resync: float = 60.0
    leader_elect: bool = False
    lease_name: str = "modelswap-operator"
    lease_seconds: int = 15
    renew_seconds: float = 10.0
    retry_seconds: float = 2.0
    kubeconfig: Path | None = None
    pod_namespace: str = "default"
    pod_name: str = "modelswap-operator"
    service_account: str = ""

    @property
    def identity(self) -> str:
        """Return what sets this operator apart from others, whichever of its replicas leads."""
        return f"{self.pod_namespace}/{self.lease_name}"


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Read flags and environment; exits with usage on a contradiction."""
    parser = _parser()
    found = parser.parse_args(arguments)
    if bool(found.namespace) == found.all_namespaces:
        parser.error("give either --all-namespaces or --namespace (repeatable)")
    if not found.lease_seconds > found.renew_seconds > 1.2 * found.retry_seconds >= 1.2:
        parser.error("--lease-seconds > --renew-seconds > 1.2 * --retry-seconds, and --retry-seconds >= 1, must hold")
    control_tls = ControlTls(found.control_tls)
    if (control_tls is ControlTls.DISABLED) != (found.control_ca_file is None):
        parser.error("--control-tls optional and required need --control-ca-file, and disabled has no use for it")
    return Settings(
        namespaces=tuple(dict.fromkeys(found.namespace)),
        log_format=found.log_format,
        log_level=found.log_level,
        http_host=found.http_host,
        http_port=found.http_port,
        control_port=found.control_port,
        control_tls=control_tls,
        control_ca_file=found.control_ca_file,
        control_server_name=found.control_server_name,
        resync=found.resync_seconds,
        leader_elect=found.leader_elect,
        lease_name=found.lease_name,
        lease_seconds=found.lease_seconds,
        renew_seconds=found.renew_seconds,
        retry_seconds=found.retry_seconds,
        kubeconfig=found.kubeconfig,
        pod_namespace=environment.get("POD_NAMESPACE", "default"),
        pod_name=environment.get("POD_NAME", "modelswap-operator"),
        service_account=environment.get("SERVICE_ACCOUNT", ""),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="modelswap_operator",
        description="Changes the weights of running inference pods to what ModelVersions say.",
    )
    add = parser.add_argument
    add("--all-namespaces", action="store_true", help="watch the whole cluster")
    add("--namespace", action="append", default=[], metavar="NS", help="watch this namespace; repeatable")
    add("--log-format", choices=["json", "text"], default="json")
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    add("--http-host", default="0.0.0.0", help="address of /livez, /readyz and /metrics")  # noqa: S104
    add("--http-port", type=int, default=8080, help="port of /livez, /readyz and /metrics")
    add("--control-port", type=int, default=8001, help="control port of pods that declare no ports at all")
    add(
        "--control-tls",
        choices=[mode.value for mode in ControlTls],
        default=ControlTls.DISABLED.value,
        help="whether control ports may, or must, speak TLS; which do is told by the name of their port",
    )
    add(
        "--control-ca-file",
        type=Path,
        default=None,
        help="authorities (PEM) of their certificates; read again on change",
    )
    add("--control-server-name", default=SERVER_NAME, help="name in their certificates; {namespace} is the pod's")
    add("--resync-seconds", type=float, default=60.0, help="every object is looked at this often at least")
    add("--leader-elect", action="store_true", help="run only while holding the Lease; exit when it is lost")
    add("--lease-name", default="modelswap-operator", help="Lease in POD_NAMESPACE; it also keeps the epoch")
    add("--lease-seconds", type=int, default=15, help="a leader silent for so long is replaced")
    add("--renew-seconds", type=float, default=10.0, help="a leader that cannot renew for so long exits")
    add("--retry-seconds", type=float, default=2.0, help="pause between attempts to get or renew the Lease")
    add("--kubeconfig", type=Path, default=None, help="default: the service account, else $KUBECONFIG")
    return parser

"""The operator's process beside a real API server, with the rights that the chart gives it and not one more."""

from __future__ import annotations

import itertools
import json
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.support.apiserver import ApiServer
from tests.support.cache import REPOSITORY
from tests.support.charts import Charts
from tests.support.free_ports import free_port
from tests.support.processes import Child
from tests.support.rest import Rest

RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


@dataclass(frozen=True, kw_only=True)
class Account:
    """The service account that the chart gives the operator of one namespace, and its Lease."""

    namespace: str
    name: str
    lease: str

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}"


def granted(server: ApiServer, rest: Rest, home: Path, *, namespace: str, all_namespaces: bool = False) -> Account:
    """Make a namespace and give the operator in it the rights that the chart gives, and not one more.

    It works under the policy that the chart installs for the whole cluster, whichever release that came with.
    """
    rest.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}}).accepted()
    values = {"watch": {"namespaces": [] if all_namespaces else [namespace]}, "rbac": {"adapterServices": True}}
    charts = Charts(home)
    given = [o for o in charts.template("modelswap", values, namespace=namespace) if o["kind"] in RIGHTS]
    owned = [o for o in charts.template("modelswap") if o["metadata"]["name"].endswith("-owned")]
    server.kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(thing) for thing in (*given, *owned)))
    rules = [rule for thing in given if thing["kind"] == "Role" for rule in thing["rules"]]
    return Account(
        namespace=namespace,
        name=next(t["metadata"]["name"] for t in given if t["kind"] == "ServiceAccount"),
        lease=next(r["resourceNames"][0] for r in rules if "leases" in r["resources"] and "resourceNames" in r),
    )


class OperatorProcess:
    """`python -m modelswap_operator` as the chart starts it, as its own service account."""

    def __init__(self, server: ApiServer, home: Path, *, account: Account) -> None:
        self._server = server
        self._home = home
        self._account = account
        self._starts = itertools.count(1)
        self.variables: dict[str, str] = {}
        self.child: Child | None = None
        self.port = 0

    @property
    def identity(self) -> str:
        """As the statuses that it writes name it."""
        return f"{self._account.namespace}/{self._account.lease}"

    def start(self, *extra: str, kubeconfig: Path | None = None) -> None:
        self.port = free_port()
        account = self._account
        environment = {
            "PYTHONPATH": f"{REPOSITORY / 'operator'}:{REPOSITORY / 'engine'}",
            "POD_NAMESPACE": account.namespace,
            "POD_NAME": "operator-0",
            "SERVICE_ACCOUNT": account.name,
            **self.variables,
        }
        command = [
            "env",
            *(f"{key}={value}" for key, value in environment.items()),
            sys.executable,
            "-m",
            "modelswap_operator",
            f"--kubeconfig={kubeconfig or self._server.kubeconfig_of(account.user)}",
            *([] if "--all-namespaces" in extra else [f"--namespace={account.namespace}"]),
            f"--lease-name={account.lease}",
            "--http-host=127.0.0.1",
            f"--http-port={self.port}",
            "--resync-seconds=5",
            *extra,
        ]
        self.child = Child("operator", command, log=self._home / f"operator-{next(self._starts)}.log")

    def wait_ready(self, *, seconds: float = 180.0) -> None:
        """Wait until the first list of every kind is done."""
        assert self.child is not None
        ends = time.monotonic() + seconds
        while self.get("/readyz") != (200, "ok"):
            self.child.check()
            assert time.monotonic() < ends, f"not ready in {seconds:.0f} s:\n{self.log()}"
            time.sleep(0.1)

    def give_lease_up(self) -> None:
        """Let the next replica lead now, whatever this one believes: as if the Lease had run out."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self._account.namespace}/leases/{self._account.lease}"
        rest = Rest(self._server, user=self._account.user)
        lease = rest.call("GET", path).accepted()
        del lease["spec"]["holderIdentity"]
        rest.call("PUT", path, lease).accepted()

    def another(self) -> OperatorProcess:
        """Return a second replica, with the same lease and account."""
        home = self._home / "another"
        home.mkdir(exist_ok=True)
        return OperatorProcess(self._server, home, account=self._account)

    def kill(self) -> None:
        assert self.child is not None
        self.child.kill()

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop()

    def get(self, path: str) -> tuple[int, str]:
        """Ask a probe or the metrics page; status 0 while nothing listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def log(self) -> str:
        assert self.child is not None
        return self.child.log.read_text()

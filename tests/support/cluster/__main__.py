"""`python -m tests.support.cluster up|down|status`: the commands behind `make cluster-up` and `make cluster-down`."""

from __future__ import annotations

import argparse
import sys

from tests.support.cluster.kind import KindProvider
from tests.support.cluster.provider import ClusterError
from tests.support.cluster.select import DEMO_CLUSTER, DEMO_PORT, cluster_provider


def _up(options: argparse.Namespace) -> None:
    cluster = cluster_provider().ensure(name=options.name, nodes=options.nodes, data_port=options.port)
    print(f"cluster {cluster.name} ({cluster.provider}, Kubernetes {cluster.version}) is up; to use it:")
    print(f"  export KUBECONFIG={cluster.kubeconfig}")
    print(f"NodePort 30080 answers at {cluster.data_url}")


def _down(options: argparse.Namespace) -> None:
    if options.all:
        KindProvider().delete_all()
    else:
        cluster_provider().delete(options.name)


def _status(_: argparse.Namespace) -> None:
    provider = KindProvider()
    for name in provider.names():
        print(f"{name}\t{provider.kubeconfig(name)}")


def main() -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.cluster", description=__doc__)
    commands = parser.add_subparsers(required=True)
    up = commands.add_parser("up", help="make the cluster, or find it running")
    up.add_argument("--name", default=DEMO_CLUSTER)
    up.add_argument("--nodes", type=int, default=1)
    up.add_argument("--port", type=int, default=DEMO_PORT, help="loopback port of NodePort 30080")
    up.set_defaults(run=_up)
    down = commands.add_parser("down", help="remove the cluster")
    down.add_argument("--name", default=DEMO_CLUSTER)
    down.add_argument("--all", action="store_true", help="every cluster, and the Docker engine started for them")
    down.set_defaults(run=_down)
    commands.add_parser("status", help="list the clusters made from this cache").set_defaults(run=_status)
    options = parser.parse_args()
    try:
        options.run(options)
    except (ClusterError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

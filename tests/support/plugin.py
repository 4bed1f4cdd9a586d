"""``kubectl modelswap`` as a user runs it: a process of its own with a kubeconfig."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.cache import REPOSITORY, kube_binaries

_CODE = "import sys; from modelswap_operator.cli.{} import main; sys.argv[0] = 'kubectl-modelswap'; main()"


def plugin(
    kubeconfig: Path, *arguments: str, stdin: str | None = None, seconds: float = 120, module: str = "app"
) -> subprocess.CompletedProcess[str]:
    """Run a command of the plugin and return what it printed."""
    environment = {
        **os.environ,
        "PATH": f"{kube_binaries('kubectl')}:{os.environ['PATH']}",
        "KUBECONFIG": str(kubeconfig),
        "PYTHONPATH": f"{REPOSITORY / 'operator'}:{REPOSITORY / 'engine'}",
    }
    return subprocess.run(
        [sys.executable, "-c", _CODE.format(module), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment,
        check=False,
    )

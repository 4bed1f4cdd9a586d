"""Renders our Helm charts with the real Helm, and reads what came out.

Refuses to know what a chart should contain.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.cache import REPOSITORY
from tests.support.tools import helm

CHARTS = REPOSITORY / "charts"
NAMES = ("modelswap", "modelswap-engine")
Object = dict[str, Any]


def ci_values(chart: str) -> list[Path]:
    """Return the value sets that a chart must render with."""
    return sorted((CHARTS / chart / "ci").glob("*-values.yaml"))


def run_helm(*arguments: str, home: Path, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm with a home of its own, so that nothing of the user's is read or written, the cluster neither."""
    environment = {**os.environ, "HELM_CONFIG_HOME": str(home), "HELM_DATA_HOME": str(home)}
    environment |= {"HELM_CACHE_HOME": str(home), "KUBECONFIG": str(kubeconfig or home / "none")}
    return subprocess.run(
        [str(helm()), *arguments], env=environment, text=True, capture_output=True, check=False, timeout=120
    )


class Charts:
    """Helm, with a folder for its files and for values; what was rendered once is remembered."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._rendered: dict[str, subprocess.CompletedProcess[str]] = {}

    def try_template(
        self,
        chart: str,
        values: Mapping[str, Any] | Path | None = None,
        *,
        release: str = "demo",
        namespace: str = "serving",
    ) -> subprocess.CompletedProcess[str]:
        """Render a chart and return what came of it: for what is expected to be refused."""
        text = values.read_text() if isinstance(values, Path) else json.dumps(values or {})
        key = "\n".join([chart, release, namespace, text])
        if key not in self._rendered:
            self._rendered[key] = self.template_anew(chart, text, release=release, namespace=namespace)
        return self._rendered[key]

    def template_anew(self, chart: str, text: str, *, release: str, namespace: str) -> subprocess.CompletedProcess[str]:
        """Render a chart with the text of a values file, without looking at what was rendered before."""
        file = self._home / "values.yaml"
        file.write_text(text)
        arguments = [release, str(CHARTS / chart), "--namespace", namespace, "--values", str(file)]
        return run_helm("template", *arguments, home=self._home)

    def template(
        self,
        chart: str,
        values: Mapping[str, Any] | Path | None = None,
        *,
        release: str = "demo",
        namespace: str = "serving",
    ) -> list[Object]:
        """Render a chart and return its objects."""
        done = self.try_template(chart, values, release=release, namespace=namespace)
        if done.returncode != 0:
            raise RuntimeError(f"helm template {chart}: {done.stderr.strip()}")
        # The C loader: definitions are long.
        return [found for found in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if found is not None]

    def lint(self, chart: str, values: Path) -> subprocess.CompletedProcess[str]:
        """Lint a chart strictly."""
        return run_helm("lint", "--strict", str(CHARTS / chart), "--values", str(values), home=self._home)


def of_kind(objects: Iterable[Object], kind: str) -> list[Object]:
    """Return the objects of one kind."""
    return [found for found in objects if found["kind"] == kind]


def one(objects: Iterable[Object], kind: str) -> Object:
    """Return the only object of one kind."""
    found = of_kind(objects, kind)
    if len(found) != 1:
        raise AssertionError(f"{len(found)} objects of kind {kind}, expected one")
    return found[0]


def pod_templates(objects: Iterable[Object]) -> Iterator[Object]:
    """Yield the pod template of every workload."""
    for found in of_kind(objects, "Deployment"):
        yield found["spec"]["template"]


def containers(spec: Object) -> list[Object]:
    """Return all containers of a pod, those that come first included."""
    return [*spec.get("initContainers", []), *spec["containers"]]


def cases() -> list[tuple[str, Path]]:
    """Return every chart with every value set of its ci folder."""
    return [(chart, values) for chart in NAMES for values in ci_values(chart)]


def case_id(case: object) -> str:
    """Name a test case after its chart or value set."""
    return case.name.removesuffix("-values.yaml") if isinstance(case, Path) else str(case)

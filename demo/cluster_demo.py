"""`make demo`: running pods on a real cluster change their weights under load, and no pod is restarted.

The order of things and what must be true at the end; `slot.py` knows how each is done.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo import report
from demo.asking import Question, ask_once
from demo.background import BackgroundLoad
from demo.console import complain, heading, say, step
from demo.model import DemoModels, ensure_models, manifest_of
from demo.object_store import IMAGE, ObjectStore
from demo.report import Facts
from demo.slot import EMBEDDED, NAME, NAMESPACE, DemoSlot, Unsettled, commands_prefix, write_model_version
from tests.support import engine_values
from tests.support.cache import REPOSITORY
from tests.support.cluster.provider import Cluster, ClusterError
from tests.support.cluster.select import DEMO_CLUSTER, DEMO_PORT, cluster_provider
from tests.support.pod import Pod
from tests.support.stack import build_images

BUILD = REPOSITORY / "build"
EXAMPLES = REPOSITORY / "examples"
QUESTION = "What is the capital of France? Answer in one sentence."
_PODS = {
    EMBEDDED: "engine pods",
    "vllm": "pods of vLLM's own server behind a sidecar",
    "sglang": "pods of SGLang's own server behind a sidecar",
}
MOUNTED, S3 = "mounted", "s3"
"""Where versions come from: a folder of the node, or an S3 server in the cluster."""
_REPLICAS = 2
_SERVED_BETWEEN = 10


class Demo:
    """One run on one cluster."""

    def __init__(self, cluster: Cluster, models: DemoModels, *, engine: str = EMBEDDED, source: str = MOUNTED) -> None:
        self.cluster, self.models, self.facts = cluster, models, Facts(engine=engine, source=source)
        self._store = ObjectStore(cluster, namespace=NAMESPACE, folder=NAME) if source == S3 else None
        self._examples = EXAMPLES / "object-store" if self._store is not None else EXAMPLES
        more = self._store.values() if self._store is not None else {}
        self._slot = DemoSlot(cluster, build=BUILD / "demo", engine=engine, more=more)

    def run(self) -> Facts:
        """Go through all of it."""
        self._install()
        heading("3. Clients keep asking the Service through the OpenAI API (openai client, no retries)")
        with self._load() as load:
            load.served_more(_SERVED_BETWEEN)
            self.facts.before = self._ask("1.0")
            self._swap(load)
            self.facts.swapping = load.summary()
            self._summary()
            self._refuse(load)
            self._revert(load)
        self.facts.swapping = load.summary()
        self._restart()
        self._conclude()
        return self.facts

    def _install(self) -> None:
        kind = _PODS[self.facts.engine]
        heading(f"2. Two Helm charts: the operator, and two {kind} that serve version 1.0")
        say(f"for the commands below: {commands_prefix(self.cluster)}")
        with step("building the images from this checkout", quiet=True):
            build_images(self.cluster, *(() if self.facts.engine == EMBEDDED else ("operator", *engine_values.IMAGES)))
            if self._store is not None:
                build_images(self.cluster, IMAGE)
        self._slot.install_operator()
        self._slot.clear()
        if self._store is not None:
            self._store.install()
            self._store.publish(self.models.base, "1.0")
        self._slot.install_engine(replicas=_REPLICAS)
        generation = self._slot.apply(self._examples / "modelversion.yaml")
        self._slot.settle(generation, to="Ready")
        self._slot.show("get", "pods")

    def _swap(self, load: BackgroundLoad) -> None:
        heading("4. The ModelVersion moves from 1.0 to 1.1")
        pods = self._slot.pods()
        started = time.monotonic()
        if self._store is not None:
            self._store.publish(self.models.tuned, "1.1", base="1.0")
            self.facts.publish_seconds = time.monotonic() - started
        started = time.monotonic()
        generation = self._slot.apply(self._examples / "modelversion-next.yaml")
        self._slot.settle(generation, to="Ready")
        self.facts.swap_seconds = time.monotonic() - started
        load.served_more(_SERVED_BETWEEN)
        self.facts.after = self._ask("1.1")
        self._expect_same_pods(pods)
        self.facts.pods = [(pod, self._slot.engine_state(pod)) for pod in self._slot.pods()]
        self._expect(self.facts.after != self.facts.before, "the answer did not change with the version")

    def _summary(self) -> None:
        heading("5. What happened")
        say("\n".join(report.swap_lines(self.facts)))
        self._slot.show("get", "pods")

    def _restart(self) -> None:
        heading("7. For comparison: the same change, 1.0 → 1.1, by restarting the pods, with a fresh load")
        say("modelswap lets go of the pods; the version is in their template now, as it is without modelswap:")
        self._slot.release()
        with self._load() as load:
            load.served_more(_SERVED_BETWEEN)
            self._ask("1.0")
            self.facts.restart_seconds = self._slot.roll_out(path="/models/smollm2-1.1", version="1.1")
            load.served_more(_SERVED_BETWEEN)
            self._ask("1.1")
        self.facts.restarting = load.summary()
        say("\n".join(report.restart_lines(self.facts)))
        self._slot.show("get", "pods")
        say("\nthe pods are handed back to modelswap, which adopts what they serve:")
        self._slot.settle(self._slot.apply(self._examples / "modelversion-next.yaml"), to="Ready")

    def _refuse(self, load: BackgroundLoad) -> None:
        heading("6. Bad versions are refused, and the pods go on with 1.1")
        load.served_more(_SERVED_BETWEEN)
        pods = self._slot.pods()
        for what, folder, wanted in (
            ("one flipped bit", self.models.corrupt, "ManifestMismatch"),
            ("a wrong shape", self.models.misshapen, "IncompatibleModel"),
        ):
            say(f"\na version with {what}, behind a digest pin that is right:")
            self._refuse_one(folder, reason=wanted)
        load.served_more(_SERVED_BETWEEN)
        self._ask("1.1")
        self._expect_same_pods(pods)

    def _refuse_one(self, folder: Path, *, reason: str) -> None:
        digest, version = manifest_of(folder).digest, folder.name.removeprefix(f"{NAME}-")
        file = write_model_version(
            BUILD / "demo" / f"modelversion-{folder.name}.yaml",
            version=version,
            uri=self._offer(folder, version),
            digest=digest,
        )
        self._slot.settle(self._slot.apply(file), to="Stalled")
        said, message = self._slot.refusal(digest)
        self._expect(said == reason, f"{folder.name} was refused for {said or 'no reason'}, not for {reason}")
        self.facts.refused.append({"version": folder.name, "reason": said, "message": message})
        self._slot.show_refusal(version)
        for pod in self._slot.pods():
            live = self._slot.engine_state(pod).live
            right = live is not None and live.digest == manifest_of(self.models.tuned).digest
            self._expect(right, f"pod {pod.name} serves {live}, not 1.1")

    def _offer(self, folder: Path, version: str) -> str:
        """Return the URI of a version that nobody should serve."""
        if self._store is None:
            return f"file:///models/{folder.name}"
        self._store.put(folder, version)
        return self._store.uri(version)

    def _revert(self, load: BackgroundLoad) -> None:
        heading("The source is reverted in place to 1.0")
        pods = self._slot.pods()
        self._slot.settle(self._slot.apply(self._examples / "modelversion.yaml"), to="Ready")
        load.served_more(_SERVED_BETWEEN)
        self._expect(self._ask("1.0") != self.facts.after, "1.0 answers like 1.1")
        self._expect_same_pods(pods)

    def _conclude(self) -> None:
        heading("The whole run")
        whole = self.facts.swapping
        if whole is not None:
            say("one load, from step 3 to the end of step 6:\n" + "\n".join(whole.lines()))
            self._expect(whole.clean, f"{whole.failed} requests failed and {whole.mixed} were mixed, not 0 and 0")
        engine = self.facts.engine
        kinds = [kind for kind in (engine, self.facts.source) if kind not in (EMBEDDED, MOUNTED)]
        file = BUILD / f"{'-'.join(['demo', *kinds])}.json"
        report.write(file, self.facts, cluster=self.cluster)
        say(f"figures: {file.relative_to(REPOSITORY)}; the cluster stays up, `make demo-down` removes it")
        say(commands_prefix(self.cluster))

    def _load(self) -> BackgroundLoad:
        return BackgroundLoad(self.cluster.data_url, model=NAME)

    def _ask(self, version: str) -> str:
        answer = asyncio.run(ask_once(self.cluster.data_url, Question(model=NAME, prompt=QUESTION)))
        self._expect(answer.served and answer.version == version, f"not an answer of {version}: {answer}")
        say(f"{QUESTION}\n   {answer.version}: {answer.text.strip()}")
        return answer.text.strip()

    def _expect_same_pods(self, before: Sequence[Pod]) -> None:
        now = self._slot.pods()
        same = [(pod.uid, pod.restarts, pod.started) for pod in before]
        self._expect(same == [(p.uid, p.restarts, p.started) for p in now], f"pods changed: {before} → {now}")

    def _expect(self, true: bool, otherwise: str) -> None:
        if not true:
            self.facts.complaints.append(otherwise)
            complain(otherwise, advice="the run goes on; the figures below show the rest")


def run(engine: str = EMBEDDED, *, source: str = MOUNTED) -> int:
    """Run the demo with pods of one kind; the exit status says whether everything was as it should be."""
    started = time.monotonic()
    heading("1. The demo model, its new version, and the cluster")
    models = ensure_models()
    with step("the cluster", quiet=True):
        cluster = cluster_provider().ensure(name=DEMO_CLUSTER, data_port=DEMO_PORT)
    say(f"Kubernetes {cluster.version} ({cluster.provider}), the Service answers at {cluster.data_url}")
    facts = Demo(cluster, models, engine=engine, source=source).run()
    say(f"took {time.monotonic() - started:.0f} s")
    return 1 if facts.complaints else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo or remove its cluster; a failure ends with what to do next."""
    parser = argparse.ArgumentParser(prog="python -m demo.cluster_demo", description=__doc__)
    parser.add_argument("--down", action="store_true", help="remove the demo's cluster")
    parser.add_argument("--engine", choices=sorted(_PODS), default=EMBEDDED, help="whose server the pods run")
    parser.add_argument("--source", choices=(MOUNTED, S3), default=MOUNTED, help="where versions come from")
    options: Any = parser.parse_args(arguments)
    try:
        if options.down:
            cluster_provider().delete(DEMO_CLUSTER)
            return 0
        return run(options.engine, source=options.source)
    except KeyboardInterrupt:
        return 130
    except Unsettled as error:
        complain(str(error), advice=f"kubectl describe modelversion {NAME}; the operator's log tells more")
    except (ClusterError, TimeoutError) as error:
        complain(str(error), advice="`kubectl get pods -A` shows what is wrong; `make demo-down` and run it again")
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
        complain(str(error), advice="`make env` repairs the environment, `make demo-down` removes the cluster")
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""`make quickstart`: the whole swap on one engine process, without a cluster, with the commands that do it.

The flow is a function of the checkpoints, so that the tests run it with tiny ones.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from demo.answers import Classifier, Summary, mixed_by_digest
from demo.asking import Question, ask_once
from demo.console import complain, heading, megabytes, milliseconds, say
from demo.engine import CommandFailed, Engine
from demo.load import Load
from demo.model import DemoModels, ensure_models, manifest_of
from modelswap_engine.protocol.messages import SwapStatus

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "What is a computer? Answer in one sentence.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the flow runs with.

    Attributes:
        home: folder for the engine's token, journal and log.
        served_between: requests that must be answered before and after each change.
        options: further options of `modelswap serve`.
    """

    models: DemoModels
    home: Path
    name: str = "smollm2"
    questions: Sequence[str] = QUESTIONS
    streams: int = 4
    max_tokens: int = 20
    served_between: int = 6
    mixed: Classifier = mixed_by_digest
    options: Sequence[str] = ()


@dataclass(slots=True)
class Record:
    """What was seen. ``complaints`` stays empty when everything was as it should be."""

    answers: dict[str, list[str]] = field(default_factory=dict)
    swap: SwapStatus | None = None
    summary: Summary | None = None
    complaints: list[str] = field(default_factory=list)


class Quickstart:
    """One run of the flow."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._models = settings.models
        self.record = Record()

    async def run(self, *, stay: bool = False) -> Record:
        """Go through all of it, and with ``stay`` leave the engine running until it is interrupted.

        Raises:
            CommandFailed: a command did not end as it should have.
        """
        chosen, models = self._settings, self._models
        heading("An engine that serves version 1.0")
        engine = Engine(
            models.base, version="1.0", name=chosen.name, roots=[models.base.parent], home=chosen.home,
            options=chosen.options,
        )  # fmt: skip
        async with engine:
            say(f"OpenAI API: {engine.data_url}/v1   log: {engine.log}\nfor the commands below:")
            say(f"export MODELSWAP_URL={engine.control_url}\nexport MODELSWAP_TOKEN_FILE={engine.token_file}")
            heading(f"{chosen.streams} clients keep asking, each on a connection of its own, without retries")
            load = Load(
                engine.data_url, model=chosen.name, streams=chosen.streams, max_tokens=chosen.max_tokens,
                mixed=chosen.mixed,
            )  # fmt: skip
            async with load:
                await self._step("1.0", engine, load)
                await self._swap(engine, load)
                await self._refuse(engine, load)
                await self._revert(engine, load)
            self._conclude(load.summary())
            if stay:
                say("\nthe engine stays up; interrupt (Ctrl-C) to end it")
                await asyncio.Event().wait()
        return self.record

    async def _swap(self, engine: Engine, load: Load) -> None:
        source = ("--source", str(self._models.tuned), "--version", "1.1")
        heading("What version 1.1 would change")
        await engine.run("plan", *source)
        heading("The swap, while the clients keep asking")
        await engine.run("swap", *source)
        self.record.swap = (await engine.state()).operation
        await self._step("1.1", engine, load)
        self._expect(self.record.answers["1.1"] != self.record.answers["1.0"], "the answers did not change")
        heading("Every live tensor, read back from memory and hashed")
        await engine.run("check")

    async def _refuse(self, engine: Engine, load: Load) -> None:
        corrupt, misshapen = self._models.corrupt, self._models.misshapen
        heading("A version with one flipped bit, behind a digest pin that is right: must be refused")
        pin = manifest_of(corrupt).digest
        await engine.run("swap", "--source", str(corrupt), "--version", "1.2", "--digest", pin, expect=1)
        heading("A version with a tensor of another shape: must be refused")
        await engine.run("swap", "--source", str(misshapen), "--version", "1.2", expect=1)
        live = (await engine.state()).live
        wanted = manifest_of(self._models.tuned).digest
        self._expect(live is not None and live.digest == wanted, f"after the refusals {live} is live, not 1.1")
        await load.served_more(self._settings.served_between)

    async def _revert(self, engine: Engine, load: Load) -> None:
        heading("Back to 1.0: its tensors are still in memory, so nothing is fetched")
        await engine.run("swap", "--source", str(self._models.base), "--version", "1.0")
        await self._step("1.0", engine, load)
        # Not held against the first answers word for word: what else is in a batch moves the last bits of the logits.
        self._expect(self.record.answers["1.0"] != self.record.answers["1.1"], "1.0 answers like 1.1")

    async def _step(self, version: str, engine: Engine, load: Load) -> None:
        """Let clients be answered, and show what the version says to the same questions."""
        await load.served_more(self._settings.served_between)
        questions = [Question(model=self._settings.name, prompt=text) for text in self._settings.questions]
        answers = await asyncio.gather(*(ask_once(engine.data_url, question) for question in questions))
        for answer in answers:
            self._expect(answer.served and answer.version == version, f"not an answer of {version}: {answer}")
            say(f"{answer.prompt}\n   {version}: {answer.text.strip()}")
        self.record.answers[version] = [answer.text.strip() for answer in answers]

    def _conclude(self, summary: Summary) -> None:
        self.record.summary = summary
        heading("Summary")
        swap = self.record.swap
        if swap is not None and swap.plan is not None:
            plan = swap.plan
            say(
                f"1.0 → 1.1 changed {plan.changed_tensors} of {plan.total_tensors} tensors, "
                f"{megabytes(plan.changed_bytes)} of {megabytes(plan.total_bytes)}; "
                f"{megabytes(swap.bytes_fetched)} fetched"
            )
            say(
                f"stop latency {milliseconds(swap.stop_latency_seconds)}, "
                f"commit window {swap.commit_window_microseconds or 0:.0f} µs, "
                f"gate closed {milliseconds(swap.pause_seconds)}, whole swap {swap.total_seconds or 0:.2f} s"
            )
        say("\n".join(summary.lines()))
        self._expect(summary.clean, f"{summary.failed} requests failed and {summary.mixed} were mixed, not 0 and 0")

    def _expect(self, true: bool, otherwise: str) -> None:
        if not true:
            self.record.complaints.append(otherwise)


async def _main(home: Path, *, stay: bool) -> Record:
    heading("The demo model, and a version of it with a trained last layer")
    models = ensure_models()
    say(f"{models.base}\n{models.tuned}")
    return await Quickstart(Settings(models=models, home=home)).run(stay=stay)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status says whether everything was as it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.quickstart", description="One engine, two versions, no restart."
    )
    parser.add_argument("--stay", action="store_true", help="leave the engine running until interrupted")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="modelswap-quickstart-") as home:
        try:
            record = asyncio.run(_main(Path(home), stay=options.stay))
        except KeyboardInterrupt:
            return 130
        except (CommandFailed, OSError, RuntimeError, ImportError) as error:
            complain(str(error), advice="read the output above; `make env` repairs the environment")
            return 1
    for complaint in record.complaints:
        complain(complaint, advice="run it again; if it stays, please report it with this output")
    say(f"took {time.monotonic() - started:.0f} s")
    return 1 if record.complaints else 0


if __name__ == "__main__":
    sys.exit(main())

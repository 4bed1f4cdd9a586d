"""The command of an engine's container, read for what a pod with a sidecar has to know of it.

Pure. Which options the launcher sets is the launcher's own table. What cannot be known from the words is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from modelswap_engine.backends.external.command import LEAVE_OUT, MODEL
from modelswap_engine.backends.launch import ENGINES
from modelswap_operator.cli.failures import PluginError

SHELLS: Final = ("sh", "bash", "dash", "ash", "zsh")
_MODEL_OPTIONS: Final = {"vllm": ("--model",), "sglang": ("--model-path", "--model")}
_SERVED: Final = "--served-model-name"


@dataclass(frozen=True, kw_only=True)
class EngineCommand:
    """What the launcher runs, and what stood in it: "" where the command did not say."""

    words: tuple[str, ...]
    python: str
    model: str
    served: str


def engine_of(words: Sequence[str]) -> str:
    """Return which engine a command starts, "" when it does not show."""
    for word in words:
        program = PurePosixPath(word).name
        for engine in ENGINES:
            if program == engine or program.startswith(f"{engine}."):
                return engine
    return ""


def read(words: Sequence[str], engine: str, *, where: str) -> EngineCommand:
    """Return a command as the launcher takes it: the model's path made a mark, the options that it sets taken out.

    Raises:
        PluginError: it cannot be run by the launcher, or does not show where the model is.
    """
    if not words or PurePosixPath(words[0]).name in SHELLS:
        raise PluginError(
            f"{where}: {'its command is a line of a shell' if words else 'it has no command'}, and what the image "
            "starts cannot be known",
            advice="write the program and its options as a list in `command` and `args`",
        )
    kept = _without_reserved(words, engine, where=where)
    place, prefix = _model_place(kept, engine, where=where)
    model = kept[place].removeprefix(prefix)
    kept[place] = prefix + MODEL
    return EngineCommand(
        words=tuple(kept),
        python=words[0] if PurePosixPath(words[0]).name.startswith("python") else "python3",
        model="" if model == MODEL else model,
        served=_served(kept, where=where),
    )


def _without_reserved(words: Sequence[str], engine: str, *, where: str) -> list[str]:
    """Take out where the engine listens and the like, with their values."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, given, _ = word.partition("=")
        advice = ENGINES[engine].reserved.get(name)
        if advice is None:
            kept.append(word)
        elif advice != LEAVE_OUT:
            raise PluginError(f"{where}: {name} is set by the launcher", advice=advice)
        elif not given:
            next(rest, None)
    return kept


def _model_place(words: Sequence[str], engine: str, *, where: str) -> tuple[int, str]:
    """Return the word that holds the model, and what stands before the model in it."""
    for index, word in enumerate(words):
        name, given, _ = word.partition("=")
        if name in _MODEL_OPTIONS[engine]:
            if given:
                return index, f"{name}="
            if index + 1 < len(words):
                return index + 1, ""
        if engine == "vllm" and word == "serve" and not (words[index + 1 : index + 2] or ["-"])[0].startswith("-"):
            return index + 1, ""
    raise PluginError(
        f"{where}: its command does not show where the model is",
        advice=f"write {' or '.join(_MODEL_OPTIONS[engine])} with the model's path"
        + (", or the path directly behind `serve`" if engine == "vllm" else ""),
    )


def _served(words: Sequence[str], *, where: str) -> str:
    names: list[str] = []
    for index, word in enumerate(words):
        name, given, value = word.partition("=")
        if name == _SERVED:
            names = [value] if given else []
            for follows in words[index + 1 :] if not given else ():
                if follows.startswith("-"):
                    break
                names.append(follows)
    if len(names) > 1:
        raise PluginError(f"{where}: {_SERVED} has {len(names)} names; a slot has one", advice="keep one of them")
    return names[0] if names else ""

"""What ``modelswap proxy`` can stand before, and how; the words of its options, and nothing that drives an engine."""

from enum import StrEnum


class Engine(StrEnum):
    """Engines that ``modelswap proxy`` stands before."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Route(StrEnum):
    """How weights are exchanged in the engine."""

    IN_PROCESS = "in-process"
    PLAIN = "plain"


class EngineRestart(StrEnum):
    """Whether the engine's container may be restarted when only that helps."""

    ALLOWED = "allowed"
    NEVER = "never"

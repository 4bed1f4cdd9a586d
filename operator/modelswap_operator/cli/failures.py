"""What a command of the plugin can fail for, each with the exit code that a script sees."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes; 2 is wrong usage, as everywhere."""

    FAILED = 1
    USAGE = 2
    TIMED_OUT = 3
    CLUSTER = 4


class PluginError(Exception):
    """A command cannot go on: the object and the cause, and the next step."""

    code = Exit.FAILED

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice


class UsageError(PluginError):
    """The arguments make no sense together."""

    code = Exit.USAGE


class TimedOutError(PluginError):
    """It did not come true in time."""

    code = Exit.TIMED_OUT


class ClusterError(PluginError):
    """kubectl failed: no rights, no cluster, no such object."""

    code = Exit.CLUSTER


class NotThereError(ClusterError):
    """The cluster has no such object."""

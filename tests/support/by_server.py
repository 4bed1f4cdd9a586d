"""Which tests of a run with several workers share one: those of a file, and those that share a real server.

A server of a session is started once for each worker that needs it, and a start costs more than most tests. The marks
that pytest-xdist has for this are not seen under pytest 9.2 (xdist 3.8), so its scheduler is told here.
"""

from typing import Final

from xdist.scheduler.loadfile import LoadFileScheduling

SHARING: Final = {
    f"tests/engines/test_{name}.py": server
    for server, names in {
        "vllm": ("vllm_backend", "vllm_inprocess", "vllm_proxy"),
        "sglang": ("sglang_inprocess", "sglang_proxy"),
    }.items()
    for name in names
}


class ByServer(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """As ``--dist loadfile``, but for what the module says."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file.startswith("tests/conformance/"):  # each backend has an engine of its own
            return f"{file} {test.partition('[')[2].rstrip(']').partition('-')[0]}"
        return SHARING.get(file, file)

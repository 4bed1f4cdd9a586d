"""The port of whatever must change together with the weights: tokenizer, chat template, generation defaults."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from modelswap_engine.protocol.messages import VersionRef

Encode = Callable[[str, str], tuple[int, ...]]
"""Makes the tokens of a text, by the tokenizer of a version's digest, which was prepared."""


class VersionListener(Protocol):
    """Somebody who keeps something per version."""

    async def prepare(self, digest: str, directory: Path) -> None:
        """Load what the version with these side files needs, before any pause; doing it twice does no harm.

        Raises:
            ModelswapError: the version cannot be served; the swap is aborted.
        """

    def activate(self, version: VersionRef) -> None:
        """Use this version from now on. It runs inside the commit: instant, never fails, prepared before."""

    def discard(self, digest: str) -> None:
        """Forget a version that will not become live; an unknown one is nothing to do."""

"""Which text model belongs to which version: the data port's ear at the swap transaction.

Called by the coordinator (a ``VersionListener``): the wanted version's tokenizer is loaded while it is staged, so
that a broken one aborts the swap before anything is paused and the commit itself only changes a reference.
"""

import asyncio
from pathlib import Path

from modelswap_engine.http.text_model import TextModel, load_text_model
from modelswap_engine.protocol.errors import NotReady, Unavailable
from modelswap_engine.protocol.messages import VersionRef

LOAD_SECONDS = 120.0
REMEMBERED_LABELS = 64


class VersionResources:
    """Text models by content digest."""

    def __init__(self) -> None:
        self._models: dict[str, TextModel] = {}
        self._labels: dict[str, str] = {}

    async def prepare(self, digest: str, directory: Path) -> None:
        """Load a version's text model beside the live one.

        Raises:
            UnsupportedFormat, InvalidCheckpoint: this version cannot be spoken with.
            Unavailable: it took too long, which says more about this machine than about the version.
        """
        if digest in self._models:
            return
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                self._models[digest] = await asyncio.to_thread(load_text_model, directory)
        except TimeoutError:
            raise Unavailable(
                f"the tokenizer did not load within {LOAD_SECONDS:.0f} s",
                advice="give the engine more CPU, or try again",
            ) from None

    def activate(self, version: VersionRef) -> None:
        """Remember the label of the version that is live from now on."""
        self._labels.pop(version.digest, None)
        self._labels[version.digest] = version.version
        while len(self._labels) > REMEMBERED_LABELS:
            del self._labels[next(iter(self._labels))]

    def discard(self, digest: str) -> None:
        """Forget a version that can no longer become live; requests that hold its text model keep it."""
        self._models.pop(digest, None)

    def of(self, digest: str) -> TextModel:
        """Return the text model of a version.

        Raises:
            NotReady: it has not been prepared.
        """
        model = self._models.get(digest)
        if model is None:
            raise NotReady(f"the tokenizer of {digest or 'the model'} is not loaded yet")
        return model

    def encode(self, digest: str, text: str) -> tuple[int, ...]:
        """Make the tokens of a text, as a completion's prompt.

        Raises:
            NotReady: the version has not been prepared.
        """
        return self.of(digest).encode(text)

    def label(self, digest: str) -> str:
        """Return the human label of a version that has been live, or an empty one."""
        return self._labels.get(digest, "")
